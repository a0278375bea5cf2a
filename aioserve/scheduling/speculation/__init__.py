"""Draft tokens in the scheduler: how many each sequence has, what is planned, and what is accepted.

The state is in `drafts.py`, and `draft_lengths.py` chooses numbers of draft tokens. The budget of a
step is in `budget.py`, and `verify.py` is the part of the step that verifies them.
"""
