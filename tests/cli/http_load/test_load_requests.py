"""Requests of a load and their prompts: drawn from a seed, with the trace's prefixes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._http_load.options import LoadOptions, requests_of, warmups_of
from aioserve.cli._http_load.prompts import WORDS, drawn_prompt
from aioserve.errors import ConfigError
from aioserve.traces.trace_request import TraceRequest

IDS = range(1000)


def shared_tokens(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


BLOCKS = st.lists(st.integers(0, 2), max_size=4)


@given(BLOCKS, BLOCKS, st.sampled_from(["", "s"]), st.integers(0, 5))
def test_prompts_share_exactly_the_blocks_that_the_trace_shares(
    first: list[int], second: list[int], session: str, seed: int
) -> None:
    block = 24
    # An id stands for all tokens up to its end, so a block after another one has another id.
    known: dict[tuple[int, ...], int] = {}
    ids = [
        tuple(known.setdefault(tuple(one[: n + 1]), len(known)) for n in range(len(one)))
        for one in (first, second)
    ]
    prompts = [
        drawn_prompt(TraceRequest(n, 0.0, block * len(one) + 24, 1, one, block, session), IDS, seed)
        for n, one in enumerate(ids)
    ]
    blocks = next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
    same = min(map(len, ids)) if blocks is None else blocks
    found = shared_tokens(*prompts)
    assert block * same <= found < block * same + 8  # the next token may be equal by chance
    assert [len(prompt) for prompt in prompts] == [block * len(one) + 24 for one in ids]
    assert all(0 <= one < 1000 for prompt in prompts for one in prompt)


def test_equal_ids_of_two_sessions_are_not_equal() -> None:
    prompts = [
        drawn_prompt(TraceRequest(0, 0.0, 64, 1, (0, 1), 32, session), IDS, 0)
        for session in ("a", "b")
    ]
    assert shared_tokens(*prompts) < 8


def test_a_seed_gives_the_same_prompt_and_another_one_another() -> None:
    one = TraceRequest(3, 0.0, 100, 1, (), 100)
    assert drawn_prompt(one, WORDS, 1) == drawn_prompt(one, WORDS, 1)
    assert drawn_prompt(one, WORDS, 1) != drawn_prompt(one, WORDS, 2)
    assert len(set(WORDS)) == len(WORDS)


def test_all_items_are_drawn_about_as_often() -> None:
    drawn = drawn_prompt(TraceRequest(0, 0.0, 64_000, 1, (), 64_000), range(64), 0)
    counts = np.bincount(drawn, minlength=64)
    assert counts.min() > 800
    assert counts.max() < 1200


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 16))
def test_random_prompts_share_a_prefix_within_their_group(
    count: int, groups: int, shared: int
) -> None:
    options = LoadOptions(
        num_requests=count,
        input_len=48,
        output_len=5,
        shared_prefix_len=shared,
        shared_prefix_groups=groups,
    )
    requests = requests_of(None, options)
    assert [one.number for one in requests] == list(range(count))
    assert {(one.prompt_tokens, one.output_tokens) for one in requests} == {(48, 5)}
    prompts = [drawn_prompt(one, IDS, 0) for one in requests]
    for number, prompt in enumerate(prompts):
        own_group = shared_tokens(prompts[number % groups], prompt)
        assert own_group >= shared
        if number >= groups:
            assert own_group < shared + 8
    for first, second in pairwise(prompts[:groups]):
        assert shared_tokens(first, second) < 8


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("gamma:2", 2.0)])
def test_pauses_between_arrivals_have_the_mean_and_variation_that_were_asked_for(
    arrivals: str, variation: float
) -> None:
    options = LoadOptions(num_requests=20_000, rate=5.0, arrivals=arrivals, seed=3)
    times = [one.arrival_seconds for one in requests_of(None, options)]
    pauses = np.diff(times)
    assert pauses.mean() == pytest.approx(0.2, rel=0.06)
    assert pauses.std() / pauses.mean() == pytest.approx(variation, rel=0.08)
    assert times == [one.arrival_seconds for one in requests_of(None, options)]


def test_random_prompts_with_a_rate_are_poisson_and_without_one_all_at_once() -> None:
    rated = requests_of(None, LoadOptions(num_requests=9, rate=2.0))
    drawn = requests_of(None, LoadOptions(num_requests=9, rate=2.0, arrivals="poisson"))
    assert rated == drawn
    assert {one.arrival_seconds for one in requests_of(None, LoadOptions())} == {0.0}


def test_a_trace_is_sent_as_it_was_recorded_or_faster(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "arrival_s,client,input_tokens,output_tokens\n1.0,a,10,2\n3.0,b,20,4\n9.0,a,5,1\n"
    )
    recorded = requests_of(trace, LoadOptions())
    assert [one.arrival_seconds for one in recorded] == [0.0, 2.0, 8.0]
    assert [one.tenant for one in recorded] == ["a", "b", "a"]
    faster = requests_of(trace, LoadOptions(speed=4.0))
    assert [one.arrival_seconds for one in faster] == [0.0, 0.5, 2.0]
    at_rate = requests_of(trace, LoadOptions(rate=1.5, num_requests=2))
    assert len(at_rate) == 2


def test_times_to_think_are_as_much_shorter_as_the_pauses() -> None:
    slow, fast = (
        requests_of(None, LoadOptions(synthetic="conversations", num_requests=40, speed=speed))
        for speed in (1.0, 8.0)
    )
    assert any(one.think_seconds for one in slow)
    for one, other in zip(slow, fast, strict=True):
        assert other.arrival_seconds == one.arrival_seconds / 8
        assert other.think_seconds == one.think_seconds / 8


def test_warm_ups_are_short_and_share_nothing_with_the_load() -> None:
    options = LoadOptions(num_requests=3, num_warmups=4, shared_prefix_len=64)
    requests = requests_of(None, options)
    warmups = warmups_of(requests, options)
    assert [(one.prompt_tokens, one.output_tokens) for one in warmups] == [(128, 2)] * 4
    prompts = [drawn_prompt(one, IDS, 0) for one in (*requests, *warmups)]
    for number, prompt in enumerate(prompts[3:], 3):
        assert all(shared_tokens(prompt, other) < 8 for other in prompts[:number])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"num_warmups": -1}, "num_warmups must be at least 0, got -1"),
        (
            {"shared_prefix_len": 9, "input_len": 8},
            "shared_prefix_len must be at most 8, got 9",
        ),
        ({"endpoint": "messages"}, "endpoint must be one of completions, chat, got 'messages'"),
        ({"prompts": "bytes"}, "prompts must be one of ids, text, got 'bytes'"),
        ({"endpoint": "chat", "prompts": "ids"}, "messages of chat are text"),
        ({"prompts": "text", "vocab_size": 9}, "vocab_size is of prompts of ids"),
        ({"speed": 0.0}, "speed must be more than 0"),
        ({"speed": 2.0, "rate": 2.0}, "give either speed or rate"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be more than 0"),
        ({"max_seconds": -1.0}, "max_seconds must be more than 0"),
        ({"predictor": "oracle"}, "predictor: forecasts are sent with --hints alone"),
        ({"deadline_seconds": 2.0}, "deadline_seconds: deadlines are sent with --hints alone"),
        ({"synthetic": "bursts", "input_len": 4}, "input_len is of random prompts"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options).check(None)  # type: ignore[arg-type]


def test_a_trace_and_a_made_up_workload_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="either a trace or --synthetic"):
        LoadOptions(synthetic="bursts").check(Path("trace.csv"))
