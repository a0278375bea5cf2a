"""Decoder architectures and how to load them.

`config`, `resolve` and the modules that they need do not import torch; `loader` and `decoder` do.
"""
