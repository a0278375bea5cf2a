"""A load generator for servers of completions: what `aioserve bench serve` runs."""

from __future__ import annotations
