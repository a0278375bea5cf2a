"""Quantisation with a text, which the model computes first.

The inputs of each linear layer decide how its weight is rounded or scaled.
"""
