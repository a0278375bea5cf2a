"""A plan becomes device work and tokens: the host of steps, workers, runners, KV storage.

Knows neither who asked nor HTTP. `runner` imports no torch, so that everything above can
be used without it.
"""
