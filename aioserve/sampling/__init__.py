"""Turns logits into tokens: sampling parameters as arrays by which a backend draws. Knows sampling
parameters, seeds and positions; must not know requests, plans or the scheduler."""
