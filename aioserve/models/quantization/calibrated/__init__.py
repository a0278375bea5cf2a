"""Quantisation that looks at a text first: the model computes it, and what goes into each linear
layer decides how its weight is rounded or scaled.
"""
