"""Models in one file: GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    file                   reads metadata, and finds tensors
    formats                makes weights of their bytes
    config, tokenizer      translate metadata into the files of Hugging Face's layout
    model                  combines them as `ModelFiles`

No torch here.
"""
