"""Trace files that are broken, hostile or endless: read, or refused with file and line, in bounded
time and memory."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve import SchedulingPolicy
from aioserve.errors import AioserveError, TraceError
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.traces import files
from aioserve.traces.formats import read_trace
from aioserve.traces.synthetic import WORKLOADS, synthetic_trace
from aioserve.traces.trace_request import TraceRequest, at_rate, with_scaled_lengths
from tests import made_up_traces
from tests.attacks.hostile import hostile_values, is_named, named_errors
from tests.attacks.mutations import little_memory, mutated
from tests.timing import computing_at_most
from tests.waits import LIMIT_SECONDS

AZURE = "arrival_s,context_tokens,generated_tokens\n"
DATES = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{n:02}.68{n}05,{100 + n},{n}\n" for n in range(20)
)
MOONCAKE = {"timestamp": 5, "input_length": 513, "output_length": 7, "hash_ids": [0, 4]}
ENTRY = {"t": 0.0, "type": "n", "in": 70, "out": 3, "hash_ids": [1]}
SESSION = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [ENTRY]}
MAX_SECONDS = 8.0
pytestmark = pytest.mark.clock


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with little_memory():
        yield


class OneSecond:
    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0


def simulated(trace: list[TraceRequest]) -> None:
    result = simulate(trace, SchedulingPolicy(), cost=OneSecond(), num_pages=100)
    assert all(record.ending is not None for record in result.requests)


def served(trace: list[TraceRequest]) -> None:
    """Assert that requests that were read can be simulated, with answers of two tokens."""
    simulated([replace(request, max_tokens=2) for request in trace[:5]])


def refused(path: Path, text: str | bytes) -> str:
    """The message of the error that a file gives."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with computing_at_most(MAX_SECONDS), pytest.raises(TraceError) as caught:
        read_trace(path)
    assert is_named(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


# -- what was found


def test_deeply_nested_sub_agents_are_refused_with_their_line(tmp_path: Path) -> None:
    agent = '{"t": 1.0, "type": "subagent", "requests": ['
    session = json.dumps(SESSION)
    deep = session.replace("[{", "[" + agent * 20_000 + "{", 1)[:-2] + "]}" * 20_000 + "]}"
    assert ":2: " in refused(tmp_path / "a.jsonl", f"{session}\n{deep}\n")
    deep = session[:-1] + ', "more": ' + "[" * 20_000 + "]" * 20_000 + "}"
    assert ":1: nested too deeply" in refused(tmp_path / "a.jsonl", deep)


def test_sub_agents_nested_as_deep_as_is_read_are_in_session_time(tmp_path: Path) -> None:
    depth = 150
    agent = '{"t": 1.0, "type": "subagent", "requests": ['
    text = json.dumps(SESSION).replace("[{", "[" + agent * depth + "{", 1)
    path = tmp_path / "a.jsonl"
    path.write_text(text[:-2] + "]}" * depth + "]}")
    (request,) = read_trace(path)
    assert request.arrival_seconds == 0.0


@pytest.mark.parametrize("size", [10**12, 10**30])
def test_a_block_size_without_bounds_is_refused(tmp_path: Path, size: int) -> None:
    entry = ENTRY | {"hash_ids": []}
    row = SESSION | {"block_size": size, "requests": [entry]}
    assert "`$.block_size`" in refused(tmp_path / "a.jsonl", json.dumps(row))


# -- and what else there is of the kind


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (json.dumps(MOONCAKE | {"input_length": 10**12, "hash_ids": []}), "input_length"),
        (json.dumps(MOONCAKE | {"output_length": 10**12}), "output_length"),
        (json.dumps(MOONCAKE | {"max_tokens": 10**12}), "max_tokens"),
        (json.dumps(MOONCAKE | {"timestamp": 1e300}), "timestamp"),
        (json.dumps(SESSION | {"requests": [ENTRY | {"t": 1e300}]}), "t`"),
        (json.dumps(SESSION | {"id": "x" * 10**6}), "id"),
        (
            json.dumps(
                SESSION | {"requests": [{"t": 1e9, "type": "subagent", "requests": []}] * 2}
            ).replace('"requests": []', '"requests": [' + json.dumps(ENTRY | {"t": 9.5e9}) + "]"),
            "arrival_seconds",
        ),
        (AZURE + "0,1000000000000,1\n", "context_tokens"),
        (AZURE + "0,1,1e300\n", "generated_tokens"),
        (AZURE + "1e300,1,1\n", "arrival_s"),
        (AZURE + f"0,{'9' * 5000},1\n", "context_tokens"),
        (AZURE.replace("\n", ",max_tokens\n") + "0,1,1,1e300\n", "max_tokens"),
        (f"arrival_s,client,input_tokens,output_tokens\n0,{'x' * 9999},1,1\n", "tenant"),
        ("arrival_s,client,input_tokens,output_tokens\n0,\x1b[2J,1,1\n", "tenant"),
    ],
)
def test_a_number_or_name_beyond_any_use_is_refused_with_its_field(
    tmp_path: Path, text: str, field: str
) -> None:
    message = refused(tmp_path / "a", text)
    assert field in message
    assert f"{tmp_path / 'a'}:{text.rstrip().count(chr(10)) + 1}: " in message


def test_long_lines_and_values_are_not_shown_whole(tmp_path: Path) -> None:
    entry = ENTRY | {"type": "y" * 10**6}
    refused(tmp_path / "a", json.dumps(SESSION | {"requests": [entry]}))
    refused(tmp_path / "a", AZURE + "0," + "z" * 10**5 + ",1\n")
    refused(tmp_path / "a", ",".join(["name"] * 10**5) + "\n")
    refused(tmp_path / "a", AZURE.strip() + ",a" * 10**5 + "\n" + "0,1,1\n")


@pytest.mark.more
def test_one_endless_line_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert "line" in refused(path, json.dumps(MOONCAKE)[:-1] + ', "pad": "' + "x" * (100 << 20))
    packed = tmp_path / "a.jsonl.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b" " * (1 << 20))
    with pytest.raises(TraceError, match=r":1: .*line"):
        read_trace(packed)


def test_a_file_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small gzip file of gigabytes, in blank lines or in few."""
    monkeypatch.setattr(files, "MAX_LINES", 1 << 16)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 24)
    path = tmp_path / "a.csv.gz"
    for line, what in ((b"\n", "lines"), (b" " * 999 + b"\n", "bytes")):
        member = gzip.compress(line * (16_000_000 // len(line)), 9)
        path.write_bytes(gzip.compress(AZURE.encode()) + member * 80)
        with pytest.raises(TraceError, match=what):
            read_trace(path)


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/stdin", "fifo", "."])
def test_what_is_no_regular_file_is_no_trace(tmp_path: Path, place: str) -> None:
    path = Path(place)
    if place == "fifo":
        path = tmp_path / "fifo"
        os.mkfifo(path)
    found: list[BaseException] = []

    def read() -> None:
        try:
            read_trace(path)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert found, "still reading"
    assert isinstance(found[0], TraceError)
    assert str(path) in str(found[0])


def test_a_file_that_changes_while_it_is_read_is_read_as_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first line tells the format, and the lines after it are those of the same file."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text(AZURE + "0,1,1\n")
    other.write_text(json.dumps(MOONCAKE))
    from aioserve.traces import formats

    begins_with = formats.begins_with

    def replace_and_look(*arguments: Any) -> bool:
        os.replace(other, path)
        monkeypatch.setattr(formats, "begins_with", begins_with)
        return begins_with(*arguments)

    monkeypatch.setattr(formats, "begins_with", replace_and_look)
    (request,) = read_trace(path)
    assert request.prompt_tokens == 1


@pytest.mark.parametrize(
    "path", ["x" * 300, "x/" * 3000, "a\0b", "\ud800", "", None, 5, ["a"], b"bytes", object()]
)
def test_a_path_that_is_none_is_named(path: Any) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert is_named(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"number": -1},
        {"number": 10**12},
        {"arrival_seconds": float("nan")},
        {"arrival_seconds": 1e300},
        {"prompt_tokens": 0},
        {"prompt_tokens": 10**12},
        {"output_tokens": 10**12},
        {"block_tokens": 0},
        {"block_tokens": 10**12},
        {"block_ids": (1,) * 1000},
        {"block_ids": (2**31,)},
        {"block_ids": (None,)},
        {"block_ids": 5},
        {"session": "\ud800"},
        {"tenant": None},
        {"max_tokens": 0},
    ],
)
def test_requests_from_python_are_checked_field_by_field(changes: dict[str, Any]) -> None:
    good = TraceRequest(0, 0.0, 10, 2, (), 10)
    bad = replace(good, **changes)
    for use in (bad.prompt_ids, lambda: simulated([bad]), lambda: simulated([good, bad])):
        with pytest.raises(TraceError, match=next(iter(changes))) as caught:
            use()
        assert is_named(caught.value)


def test_requests_with_one_number_are_refused() -> None:
    """Requests with one number would be mistaken for one: their private tokens are made of the
    number."""
    trace = [TraceRequest(3, float(n), 10, 2, (), 10) for n in range(2)]
    with pytest.raises(TraceError, match="number"):
        served(trace)


def test_made_up_workloads_and_changes_of_a_trace_have_bounds() -> None:
    trace = [TraceRequest(n, float(n), 10, 2, (), 10) for n in range(3)]
    attacks: list[Callable[[], object]] = [
        lambda: synthetic_trace("bursts", 10**12),
        lambda: synthetic_trace("bursts", 10**5000),
        lambda: synthetic_trace("conversations", 5, rate=1e-300),
        lambda: synthetic_trace("bursts", 5, rate=5e-324),
        lambda: synthetic_trace("bursts", 5, seed=10**5000),
        lambda: at_rate(trace, 1e-300),
        lambda: at_rate(trace, 10**400),
        lambda: with_scaled_lengths(trace, 1e300),
        lambda: with_scaled_lengths(trace, 1e308),
        lambda: with_scaled_lengths(trace, 10**400),
    ]
    for attack in attacks:
        with pytest.raises(AioserveError) as caught:
            attack()
        assert is_named(caught.value)


# -- and what nobody has thought of


def _texts() -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {
            "mooncake": made_up_traces.mooncake(folder, num_conversations=3),
            "agentic": made_up_traces.agentic(folder, num_sessions=2),
            "azure": made_up_traces.azure(folder, num_requests=20),
            "servegen": made_up_traces.servegen(folder, num_requests=20),
        }
        return {kind: gzip.decompress(path.read_bytes()) for kind, path in files.items()} | {
            "azure-dates": DATES.encode()
        }


TEXTS = _texts()


@pytest.mark.parametrize("kind", TEXTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_fuzz_trace_files(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    text = data.draw(mutated(TEXTS[kind]))
    path = tmp_path / ("a.gz" if text[:2] == b"\x1f\x8b" else "a")
    path.write_bytes(text)
    with computing_at_most(MAX_SECONDS), named_errors():
        served(read_trace(path))


@given(st.data())
def test_fuzz_made_up_workloads(data: st.DataObject) -> None:
    options = data.draw(
        st.dictionaries(st.sampled_from(["num_requests", "rate", "seed"]), hostile_values())
    )
    name = data.draw(st.one_of(st.sampled_from(list(WORKLOADS)), hostile_values()))
    if type(options.get("num_requests")) is int and 1000 < options["num_requests"] <= 100_000:
        options["num_requests"] %= 1000
    with named_errors():
        served(synthetic_trace(name, **options))


@given(hostile_values(), hostile_values())
def test_fuzz_rates_and_lengths(rate: Any, factor: Any) -> None:
    trace = [TraceRequest(n, float(n), 10, 2, (), 10) for n in range(3)]
    with named_errors():
        served(at_rate(trace, rate))
    with named_errors():
        served(with_scaled_lengths(trace, factor))
