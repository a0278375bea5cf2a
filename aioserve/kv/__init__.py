"""Who owns which page of the KV cache: page pool, page tables, page arithmetic.

Knows page numbers, reference counts and step numbers; knows neither tensors, nor what a token
means, nor asyncio.
"""

from __future__ import annotations
