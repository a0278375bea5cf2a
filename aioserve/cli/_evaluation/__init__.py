"""What `aioserve evaluate` measures: perplexity of a model on a text, and divergence from another
model. Knows the public API of `Engine` alone, and the model's tokenizer."""
