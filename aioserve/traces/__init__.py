"""Workloads, recorded or made up. Knows nothing of the programs that serve them."""

from __future__ import annotations
