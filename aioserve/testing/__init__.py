"""Tools that plugin authors and aioserve's own tests share: an engine without a model, a virtual
clock, and checks of an engine's state.

    async def serve_two():
        async with Engine(FakeModel(), policy=MyPolicy()) as engine:
            await asyncio.gather(engine.generate([1, 2]), engine.generate([3, 4]))
            check_invariants(engine)

    run_simulated(serve_two, seed=7)
"""

from __future__ import annotations

from aioserve.testing.drafter_check import DraftTimes, check_drafter
from aioserve.testing.fake_device import FakeDevice, expected_logprobs, expected_tokens
from aioserve.testing.fake_model import (
    FakeModel,
    FakeRequest,
    FakeRunner,
    Fault,
    Faults,
    PlantedError,
    byte_tokenizer,
    random_step_seconds,
)
from aioserve.testing.invariants import check_invariants, count_leaked_pages, scribble_free_pages
from aioserve.testing.model_checks import check_model_family
from aioserve.testing.parser_check import (
    check_reasoning_parser,
    check_tool_parser,
    read_calls,
)
from aioserve.testing.plugin_checks import (
    check_admission,
    check_eviction,
    check_logits_processor,
    check_observer,
)
from aioserve.testing.policy_check import check_policy
from aioserve.testing.sim_loop import DeadlockError, SimLoop, SimulationError, run_simulated
from aioserve.testing.stream_checker import StreamChecker
from aioserve.testing.trial import replay
from aioserve.testing.weight_checks import check_weight_format

__all__ = [
    "DeadlockError",
    "DraftTimes",
    "FakeDevice",
    "FakeModel",
    "FakeRequest",
    "FakeRunner",
    "Fault",
    "Faults",
    "PlantedError",
    "SimLoop",
    "SimulationError",
    "StreamChecker",
    "byte_tokenizer",
    "check_admission",
    "check_drafter",
    "check_eviction",
    "check_invariants",
    "check_logits_processor",
    "check_model_family",
    "check_observer",
    "check_policy",
    "check_reasoning_parser",
    "check_tool_parser",
    "check_weight_format",
    "count_leaked_pages",
    "expected_logprobs",
    "expected_tokens",
    "random_step_seconds",
    "read_calls",
    "replay",
    "run_simulated",
    "scribble_free_pages",
]
