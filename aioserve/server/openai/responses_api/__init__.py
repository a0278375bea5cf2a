"""`/v1/responses`: answers in items, which can be stored and continued.

    request ──► handlers ──► response ──► store

Conversations are made of `items`, in requests and in answers.
"""
