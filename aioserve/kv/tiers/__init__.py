"""Tiers: the storages that pages are in, nearest first, and the copies between them.

Steps compute in the pages of tier 0, the device. Pages that it has no room for go to the next tier
of the list. What is behind a page of one tier in the prefix tree is in that tier or a later one.
"""

from __future__ import annotations
