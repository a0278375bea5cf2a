"""`/v1/responses`: answers in items, which may be stored and gone on from.

    request ──► truncation ──► making ──► writer ──► response ──► store ──► stored

`items` are what a conversation is made of, on the way in and on the way out.
"""
