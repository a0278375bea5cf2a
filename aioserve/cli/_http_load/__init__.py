"""Load generator for servers of completions: `aioserve bench serve` runs it."""

from __future__ import annotations
