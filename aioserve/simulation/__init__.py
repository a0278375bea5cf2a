"""Traces run through the real scheduler and KV memory on a virtual clock, and what came of it.

Knows neither asyncio nor torch: what is here runs on a machine without a model.
"""

from __future__ import annotations
