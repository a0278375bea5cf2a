"""Simulation of traces: the real scheduler and KV memory run on a virtual clock, and are measured.

Knows neither asyncio nor torch, so it runs on a machine without a model.
"""

from __future__ import annotations
