"""Heads that draft tokens from the hidden states of the model that they were trained for.

A head is a directory of its own, with config.json and weights. The kinds are EAGLE-3, multi-token
prediction and Medusa, in files of the library `speculators` or of the methods' authors. A head
knows hidden states, token ids and KV pages. It must not know drafters, requests or the verification
of draft tokens.
"""
