"""Logits to tokens. Knows logits, sampling parameters, seeds and positions; must not know requests,
plans or the scheduler."""
