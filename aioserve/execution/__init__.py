"""Turns plans into device work and tokens: the host of steps, workers, runners, KV storage.

Knows nothing of requests' callers or HTTP. `runner` imports no torch, so that everything above can
be used without it.
"""
