"""Decoder architectures and how to load them.

`config`, `resolve` and what they need import no torch; `loader` and `decoder` do.
"""
