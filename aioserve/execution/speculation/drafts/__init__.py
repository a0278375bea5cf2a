"""Models that guess for another, beside the steps of that: smaller models and heads.

Knows plans, decoders and KV pages, as `aioserve.execution` does; it must not know the event loop.
"""
