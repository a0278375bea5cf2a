"""Groups of layers with the same kind of KV: which pages each kind needs, and when it returns them.

    base.py     `Group`: the verbs that a lease needs of one kind of KV
    full.py     all positions are kept
    window.py   the last positions are kept
    making.py   the groups of a layout

`KVMemory` loops over a list of groups, and names no kind. Group 0 has a page for each position, and
the prefix tree consists of these pages. Pages of other groups lie beside them, as group pages.
"""

from __future__ import annotations
