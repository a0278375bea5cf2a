"""Draft tokens in the scheduler: how many each sequence has, what is planned, and what is accepted.

`drafts.py` has what is known of them, `draft_lengths.py` the choice of how many, `budget.py` who
has them in a step, and `verify.py` the part of the step that verifies them.
"""
