"""Compares the roofline of the presets with steps that others measured.

The steps are those of Llama 2 70B in the latency profile of splitwise-sim. The roofline is that of
the preset llama-3-70b, which has the same layers and a larger vocabulary.

    python benchmarks/roofline.py perf_model.csv
"""

from __future__ import annotations

import argparse

from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.simulation.calibration import read_latency_profile
from aioserve.simulation.roofline import RooflineCost
from aioserve.steps.plan import PENDING_IDS, ItemKind, SampleRow, StepPlan, WorkItem

CONTEXT_TOKENS = 512 + 64
"""Mean context of a decoding sequence in the profile: 512 tokens of prompt, 128 of answer."""
STEPS = {
    "prefill of 512": [(0, 512)],
    "prefill of 2,048": [(0, 2048)],
    "decoding 1": [(CONTEXT_TOKENS, 1)],
    "decoding 32": [(CONTEXT_TOKENS, 1)] * 32,
}
"""First position and count of each item."""


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", help="data/perf_model.csv of splitwise-sim, or the like")
    profile = parser.parse_args().profile
    shape = ModelShape.of(read_model("llama-3-70b"))
    table = Table(title="milliseconds", box=None)
    table.add_column("step")
    for column in ("GPUs", "measured", "roofline", "ratio"):
        table.add_column(column, justify="right")
    for hardware in ("a100", "h100"):
        for count in (2, 4, 8):
            measured = read_latency_profile(profile, f"llama2-70b,{hardware}-80gb,{count}")
            roofline = RooflineCost(shape, hardware_preset(hardware).times(count))
            for name, items in STEPS.items():
                plan = plan_of(items)
                seconds = measured.step_seconds(plan), roofline.step_seconds(plan)
                table.add_row(
                    name,
                    f"{count} {hardware}",
                    *(f"{value * 1e3:.1f}" for value in seconds),
                    f"{seconds[0] / seconds[1]:.2f}",
                )
    Console(highlight=False).print(table)


def plan_of(items: list[tuple[int, int]]) -> StepPlan:
    work = [
        WorkItem(
            kind=ItemKind.DECODE if count == 1 else ItemKind.PREFILL,
            sequence_id=1,
            slot=0,
            start=start,
            index=start,
            count=count,
            token_ids=PENDING_IDS,
            rows=(SampleRow(offset=count - 1, slot=0),),
        )
        for start, count in items
    ]
    return StepPlan(step=1, items=tuple(work))


if __name__ == "__main__":
    main()
