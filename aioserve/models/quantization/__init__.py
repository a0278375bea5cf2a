"""Weights of fewer bits: rounding of plain weights, and the formats that checkpoints store.

No torch here.
"""
