"""KV in pages: formats of entries, layers that share a page, and page arithmetic.

    format.py   in which numbers an entry is kept, and its bytes
    layout.py   which layers share a page, and how many tokens of each are kept
    pages.py    indices of entries to pages and locations

Values and arithmetic alone. Knows no owner of a page, no tensors and no other place of the package.
"""

from __future__ import annotations
