"""Figures, each under its name."""

from __future__ import annotations

import msgspec

from aioserve.simulation.cost import StepsOutside
from aioserve.simulation.figures import FIGURES, group_rows, rows
from aioserve.simulation.metrics import (
    Goodput,
    GroupMetrics,
    Metrics,
    SpeculationMetrics,
    Spread,
)

METRICS = Metrics(
    requests=9,
    finished=1234,
    cut_short=8,
    refused=2,
    too_long=3,
    overdue=19,
    seconds=4.04,
    busy_seconds=5.0,
    busy_share=0.875,
    steps=60_000,
    output_tokens=7,
    output_tokens_per_second=8.08,
    ttft_seconds=Spread(0.0, 0.111, 0.222, 0.333, 9.0),
    tpot_seconds=Spread(0.0, 0.0111, 0.0222, 0.0333, 9.0),
    e2e_seconds=Spread(0.0, 1.111, 2.222, 3333.333, 9.0),
    queue_seconds=None,
    gap_seconds=Spread(0.0, 0.01, 0.02, 0.03, 0.444),
    goodput=Goodput(5, 0.123, 0.4567),
    max_wait_tokens=98_765,
    service_gap_tokens=43_210,
    tenants={
        "ann": GroupMetrics(7, 6, 5555, Spread(0.0, 0.1, 0.2, 0.3, 0.4), 12),
        "bob": GroupMetrics(1, 0, 0, None, 0),
    },
    classes={"chat": GroupMetrics(9, 8, 7, None, 6, Goodput(5, 0.5, 0.1))},
    blocks=10,
    block_hits=3,
    block_hit_share=0.3,
    token_hit_share=0.25,
    tokens_computed=11,
    tokens_prefilled=12,
    preemptions=13,
    policy_faults=16,
    steps_outside=StepsOutside(7_500, 0.125, "decode_batch = 9 (measured: 0 to 8)"),
    num_pages=14,
    page_size=15,
    kv_occupancy_mean=0.5,
    kv_occupancy_max=0.75,
    pages_swapped_out=17,
    pages_swapped_in=18,
    speculation=SpeculationMetrics(1900, 1200, 0.625, 2.75, (1000, 900), (700, 500)),
)


def test_every_name_stands_for_its_figure() -> None:
    assert [(label, *cells) for label, cells in rows({"a": METRICS})] == [
        ("finished", "1,234"),
        ("of those, cut short", "8"),
        ("refused by the policy", "2"),
        ("too long for memory or model", "3"),
        ("ended at their deadline", "19"),
        ("time to first token p50, s", "0.11"),
        ("time to first token p90, s", "0.22"),
        ("time to first token p99, s", "0.33"),
        ("time per output token p50, ms", "11.10"),
        ("time per output token p90, ms", "22.20"),
        ("time per output token p99, ms", "33.30"),
        ("gap between tokens p50, ms", "10.00"),
        ("gap between tokens p99, ms", "30.00"),
        ("gap between tokens max, ms", "444.00"),
        ("in the queue p50, s", "-"),
        ("in the queue p90, s", "-"),
        ("in the queue p99, s", "-"),
        ("whole answer p50, s", "1.11"),
        ("whole answer p90, s", "2.22"),
        ("whole answer p99, s", "3,333.33"),
        ("met their targets", "12.3%"),
        ("goodput, requests/s", "0.457"),
        ("output tokens/s", "8.1"),
        ("longest wait, tokens", "98,765"),
        ("gap between tenants, tokens", "43,210"),
        ("prefix blocks found", "30.0%"),
        ("prompt tokens found", "25.0%"),
        ("tokens per step of a sequence", "2.75"),
        ("draft tokens verified", "1,900"),
        ("of those, right", "62.5%"),
        ("preemptions", "13"),
        ("pages swapped out", "17"),
        ("pages swapped in", "18"),
        ("steps with a fault of the policy", "16"),
        ("KV pages held, mean", "50.0%"),
        ("KV pages held, most", "75.0%"),
        ("time in steps", "87.5%"),
        ("steps", "60,000"),
        ("of those, not measured", "12.5%"),
        ("simulated time, s", "4.0"),
    ]
    assert group_rows({"a": METRICS}, "tenants") == [
        ("tokens served", [("ann (7)", ["5,555"]), ("bob (1)", ["0"])]),
        ("time to first token p99, s", [("ann (7)", ["0.30"]), ("bob (1)", ["-"])]),
        ("longest wait, tokens", [("ann (7)", ["12"]), ("bob (1)", ["0"])]),
    ]
    assert group_rows({"a": METRICS}, "classes") == [
        ("tokens served", [("chat (9)", ["7"])]),
        ("longest wait, tokens", [("chat (9)", ["6"])]),
        ("met their targets", [("chat (9)", ["50.0%"])]),
    ]


def test_what_was_not_measured_is_a_hyphen_or_no_row() -> None:
    nothing = msgspec.structs.replace(
        METRICS,
        tenants={},
        goodput=None,
        service_gap_tokens=None,
        speculation=None,
        ttft_seconds=None,
        block_hit_share=None,
    )
    alone = dict(rows({"a": nothing}))
    assert len(alone) == len(FIGURES) - 6
    assert alone["time to first token p50, s"] == alone["prefix blocks found"] == ["-"]
    assert group_rows({"a": nothing}, "tenants") == []
    both = dict(rows({"a": nothing, "b": METRICS}))
    assert both["met their targets"] == ["-", "12.3%"]
