"""`/v1/chat/completions`: the next message of a conversation.

request ──► making ──► choices ──► one body, or chunks
"""
