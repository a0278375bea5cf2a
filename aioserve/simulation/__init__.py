"""Workloads, recorded or made up, as the scheduler and the KV memory would see them.

Knows neither asyncio nor torch: what is here runs on a machine without a model.
"""

from __future__ import annotations
