"""Workloads, recorded or made up. Knows nothing of those who serve them."""

from __future__ import annotations
