"""Runs traces through the real scheduler and KV memory on a virtual clock, and measures the result.

Knows neither asyncio nor torch: what is here runs on a machine without a model.
"""

from __future__ import annotations
