"""KV in pages: formats of entries, layers that share a page, and page arithmetic.

    format.py   number formats of an entry, and its bytes
    layout.py   layers that share a page, and the tokens that each of them keeps
    pages.py    indices of entries to pages and locations

Values and arithmetic only. Imports no other folder, and knows neither tensors nor owners of pages.
"""

from __future__ import annotations
