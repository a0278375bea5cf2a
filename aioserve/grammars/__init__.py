"""Tokens that may come next in a completion that must have a structured output.

    StructuredOutput ──► compiled once ──► a matcher per completion: token by token, what may follow
    tokenizer ──► vocabulary ──┘

The library llguidance does the work. Knows tokenizers and structured output; must not know torch,
requests or the scheduler.
"""
