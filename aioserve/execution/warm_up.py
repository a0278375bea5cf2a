"""First steps of a runner, before any request waits for one.

The first step pays for one-time work: threads, kernels that are compiled or chosen, and the first
use of weights and work space. Without a warm-up the first request would wait for all of it.
"""

from __future__ import annotations

import numpy as np

from aioserve.execution.runner import Runner
from aioserve.paging.pages import capacity_tokens, pages_for
from aioserve.request import SamplingParams
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import PENDING_IDS, ItemKind, SampleRow, SlotStart, StepPlan, WorkItem

__all__ = ["warm_up"]

PROMPT_TOKENS = 32
"""Length of the first prompt if the cache has room for it. It is long enough for kernels of
several rows."""

WARM_UP_STEP = -2
"""Number of its steps, in the log."""

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)


async def warm_up(
    runner: Runner,
    *,
    num_pages: int,
    page_size: int,
    num_groups: int,
    max_model_len: int,
    max_step_tokens: int,
) -> None:
    """Compute a short prompt and one more token, once greedily and once sampled.

    A step has at most `max_step_tokens`. For a runner that has computed nothing yet. It leaves slot
    0 ended, and stray KV in pages `[0, n)`. Raises what a step raises.
    """
    room = min(capacity_tokens(num_pages // num_groups, page_size), max_model_len)
    length = min(PROMPT_TOKENS, room - 1, max_step_tokens)
    if length < 1:
        return  # a context of one token leaves no step after the prompt
    table = np.arange(num_groups * pages_for(length + 1, page_size), dtype=np.int32)
    row = (SampleRow(offset=length - 1, slot=0),)
    prompt = WorkItem(ItemKind.PREFILL, 0, 0, 0, 0, length, np.zeros(length, np.int32), row)
    last = (SampleRow(offset=0, slot=0),)
    behind = WorkItem(ItemKind.DECODE, 0, 0, length, length, 1, PENDING_IDS, last)
    for params in (GREEDY, SAMPLED):
        start = SlotStart(slot=0, params=params, seed=0, prompt_tokens=length)
        plans = (
            StepPlan(
                step=WARM_UP_STEP,
                started_slots=(start,),
                pages=(SlotPages(0, 0, table),),
                items=(prompt,),
            ),
            StepPlan(step=WARM_UP_STEP, items=(behind,)),
            StepPlan(step=WARM_UP_STEP, ended_slots=(0,), items=()),
        )
        for plan in plans:
            await runner.launch(plan)
