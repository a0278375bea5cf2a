"""Tiers: the storages that pages are in, nearest first, and the copies between them.

Steps compute in the pages of tier 0, the device. Pages that don't fit there go to the next tier of
the list. In the prefix tree, everything after a page is in its tier or a later one.
"""

from __future__ import annotations
