"""`/v1/completions`: prompts of text or token ids, continued.

request ──► making ──► together ──► choices ──► one body, or chunks
"""
