"""Speculation: the source of draft tokens, the plans that leave them open, and their verification.

resolver         known tokens of each slot; fixes the draft tokens that a plan leaves open
resolving_queue  the same for a device that runs ahead of the host
drafting         drafters on the thread that launches steps
drafts/          models and heads that draft
branches         further paths of draft tokens beside the first
verification     the token of each row; verified_rows: accepted draft tokens
"""
