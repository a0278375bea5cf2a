"""Turns logits into tokens: what sampling parameters mean, as arrays that a backend draws by. Knows
sampling parameters, seeds and positions; must not know requests, plans or the scheduler."""
