"""The async shell: `Engine`, the core loop, `TokenStream`. Knows neither pages nor tensors."""
