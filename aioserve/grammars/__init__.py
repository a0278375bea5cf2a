"""Which tokens may come next for an answer to have the form that was asked for.

    StructuredOutput ──► compiled once ──► a matcher per answer: token by token, what may follow
    tokenizer ──► vocabulary ──┘

llguidance does the work. Knows tokenizers and forms of answers; must not know torch, requests or
the scheduler."""
