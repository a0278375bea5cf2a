"""Draft tokens: where they come from, how plans that leave them open are resolved, and which are
accepted.

    resolver         known tokens of each slot; a plan and its draft tokens become definite
    resolving_queue  the same where the device runs ahead of the host
    drafting         drafters on the thread that launches steps
    drafts/          models and heads that draft
    branches         further paths of draft tokens beside the first
    verification     the token of each row; verified_rows: which are accepted
"""
