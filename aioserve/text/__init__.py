"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings, chat templates, and
parsers of completions.

Knows a model directory's tokenizer files and nothing else: no torch, no scheduling, no I/O after
loading. Import what you need from the submodules.
"""
