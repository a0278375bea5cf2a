"""Heads that guess tokens from the hidden states of the model that they were trained for.

A head is a directory of its own, with config.json and weights: EAGLE-3's, as the library
`speculators` and the programs of its authors write them, and Medusa's. It knows hidden states,
token ids and KV pages; it must not know drafters, requests or how guesses are verified.
"""
