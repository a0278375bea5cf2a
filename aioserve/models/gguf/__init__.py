"""Models in one file: GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

`file` reads what a file says and where its tensors lie, `formats` makes weights of their bytes,
`config` and `tokenizer` translate what the file says of the model, and `model` is all of it under
the names that a directory in Hugging Face's layout has. No torch here.
"""
