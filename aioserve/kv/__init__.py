"""Ownership of the pages of the KV cache: page pool, prefix tree, page tables, page arithmetic.

Knows page numbers, token ids, reference counts and step numbers. Must not know tensors, the meaning
of tokens, or asyncio.
"""

from __future__ import annotations
