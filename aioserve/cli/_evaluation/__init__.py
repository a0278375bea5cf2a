"""Measurements of `aioserve evaluate`: perplexity of a model on a text, and divergence from another
model.

Knows only the public API of `Engine` and the model's tokenizer.
"""
