"""All parts of a step, in the order in which they take their rows of an outcome."""

from __future__ import annotations

from aioserve.scheduling.parts.base import RowPart
from aioserve.scheduling.parts.draw import Draw
from aioserve.scheduling.parts.forced import Forced
from aioserve.scheduling.parts.mask import Mask
from aioserve.scheduling.parts.pool import Pool
from aioserve.scheduling.parts.score import Score
from aioserve.scheduling.speculation.verify import Verify

__all__ = ["DRAW", "FORCED", "MASK", "OF_PROMPTS", "PARTS", "PLAIN", "VERIFY"]

SCORE, POOL, MASK, DRAW, VERIFY, FORCED = Score(), Pool(), Mask(), Draw(), Verify(), Forced()

OF_PROMPTS: tuple[RowPart, ...] = (SCORE, POOL, DRAW)
"""Parts that are asked for each item of known tokens."""

PARTS: tuple[RowPart, ...] = (SCORE, POOL, MASK, DRAW, VERIFY, FORCED)

PLAIN: tuple[RowPart, ...] = (DRAW,)
"""Parts of a step of plain decodes."""
