"""Models and hardware in figures: how much memory a model takes, and how many requests fit.

Nothing is loaded or measured. Knows neither torch nor the scheduler.
"""

from __future__ import annotations
