"""Smaller models and heads that draft for another model, beside its steps.

Knows plans, decoders and KV pages, as `aioserve.execution` does. Must not know the event loop.
"""
