"""`/v1/responses`: answers in items, which may be stored and gone on from.

    request ──► handlers ──► response ──► store

`items` are what a conversation is made of, on the way in and on the way out.
"""
