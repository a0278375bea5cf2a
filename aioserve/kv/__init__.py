"""Ownership of the pages of the KV cache: page pool, prefix tree, page tables, page arithmetic.

Knows page numbers, token ids, reference counts and step numbers; knows neither tensors, nor what a
token means, nor asyncio.
"""

from __future__ import annotations
