"""Tokens that may come next for a completion to have the structured output that was asked for.

    StructuredOutput ──► compiled once ──► a matcher per completion: token by token, what may follow
    tokenizer ──► vocabulary ──┘

llguidance does the work. Knows tokenizers and structured output; must not know torch, requests or
the scheduler."""
