"""Weights of fewer bits: how plain ones are rounded to them, and how checkpoints store them.

No torch here.
"""
