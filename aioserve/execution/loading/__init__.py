"""Makes a model that is ready to serve, from its name and options.

target    the device, before anything is imported for it
read      files -> weights, draft, tokenizer: without torch
place     what was read -> decoder, KV pages, drafter, runner
cpu, cuda the parts of `place` that differ by device
loader    reads in threads while torch is imported, then places
"""

from aioserve.execution.loading.loader import load

__all__ = ["load"]
