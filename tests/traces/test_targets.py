"""Targets of requests: of the trace, of their tenant, of their class, and of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError, TraceError
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TARGETS, TraceRequest
from aioserve.traces.workload import WorkloadOptions, with_targets, workload

NAMES = st.sampled_from(["", "a", "b"])
SECONDS = st.sampled_from([0.25, 1.0, 30.0])


@st.composite
def requests(draw: st.DrawFn) -> list[TraceRequest]:
    return [
        TraceRequest(
            number,
            0.0,
            1,
            1,
            (),
            1,
            tenant=draw(NAMES),
            request_class=draw(NAMES).upper(),
            ttft_target_seconds=draw(st.none() | SECONDS),
            tpot_target_seconds=draw(st.none() | SECONDS),
            deadline_seconds=draw(st.none() | SECONDS),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(requests(), st.data())
def test_what_is_said_of_fewer_requests_goes_before_what_is_said_of_more(
    trace: list[TraceRequest], data: st.DataObject
) -> None:
    target = data.draw(st.sampled_from(TARGETS))
    known = sorted({name for r in trace for name in (r.tenant, r.request_class) if name})
    by_name = data.draw(st.dictionaries(st.sampled_from(["", *known]), SECONDS))
    texts = [f"{name}={seconds}" if name else str(seconds) for name, seconds in by_name.items()]
    found = with_targets(trace, **{target: texts})
    for before, after in zip(trace, found, strict=True):
        said = [
            by_name.get(name) if name else None for name in (before.tenant, before.request_class)
        ]
        said += [getattr(before, target), by_name.get("")]
        assert getattr(after, target) == next((one for one in said if one is not None), None)
        assert [getattr(after, other) for other in TARGETS if other != target] == [
            getattr(before, other) for other in TARGETS if other != target
        ]


def test_one_number_is_as_good_as_a_text_or_a_list_of_them() -> None:
    trace = [TraceRequest(0, 0.0, 1, 1, (), 1)]
    given_: list[Any] = [2, 2.0, "2", [2], ("2.0",)]
    for one in given_:
        options = WorkloadOptions(ttft_target_seconds=one)
        assert [r.ttft_target_seconds for r in workload(trace, options)] == [2.0]
    for none in (None, (), []):
        assert workload(trace, WorkloadOptions(ttft_target_seconds=none)) == trace


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ("c=1", r"must be SECONDS or NAME=SECONDS .*\(a, b\), got 'c=1'"),
        ("both=1", "'both' is both a tenant and a class"),
        (["a=1", "a=2"], "'a=2' comes after another one for the same"),
        ([1, "2"], "'2' comes after another"),
        ("a=x", "of a must be a number, got 'x'"),
        ("x", "must be a number, got 'x'"),
        ("a=", "of a must be a number, got ''"),
        ("a=0", "of a must be more than 0, got 0.0"),
        ("inf", "must be at most 1e.09, got inf"),
        ("nan", "must be more than 0, got nan"),
        (True, "must be more than 0, got True"),
        ({"a": 1}, "must be more than 0, got"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_target_is_named(target: str, given_: Any, said: str) -> None:
    trace = [TraceRequest(0, 0.0, 1, 1, (), 1, tenant="a", request_class="b")]
    if "both" in given_ if isinstance(given_, str) else False:
        trace.append(TraceRequest(1, 0.0, 1, 1, (), 1, tenant="both", request_class="both"))
    with pytest.raises(ConfigError, match=f"^{target}:? {said}"):
        with_targets(trace, **{target: given_})


CSV = "arrival_s,{},input_tokens,output_tokens,class,deadline_seconds,ttft_target_seconds\n"


@pytest.mark.parametrize("column", ["tenant", "client"])
def test_a_csv_may_tell_tenants_under_two_names_and_classes_and_targets(
    tmp_path: Path, column: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(CSV.format(column) + "0,ann,5,6,chat,9,0.5\n1,,5,6,,,\n")
    first, second = read_trace(path)
    assert (first.tenant, first.request_class) == ("ann", "chat")
    assert (first.deadline_seconds, first.ttft_target_seconds) == (9.0, 0.5)
    assert first.tpot_target_seconds is None
    assert (second.tenant, second.request_class, second.has_target) == ("", "", False)
    path.write_text(f"arrival_s,context_tokens,generated_tokens,{column}\n0,5,6,bob\n")
    assert read_trace(path)[0].tenant == "bob"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CSV.format("client") + "0,a,5,6,c,0,1\n", "deadline_seconds must be seconds of more than"),
        (CSV.format("client") + "0,a,5,6,c,1,x\n", "ttft_target_seconds must be seconds .*'x'"),
        (CSV.format("client") + "0,a,5,6,c,1e10,1\n", "deadline_seconds must .* at most 1e.09"),
        (CSV.format("client") + f"0,a,5,6,{'c' * 501},1,1\n", "request_class must be a text"),
        ("arrival_s,client,input_tokens,output_tokens,tenant\n0,a,5,6,a\n", "tenant and client"),
    ],
)
def test_a_column_that_makes_no_sense_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"a.csv:2: .*{said}"):
        read_trace(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [], %s}',
        '{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": '
        '[{"type": "n", "t": 0, "in": 5, "out": 6, "hash_ids": [], %s}]}',
    ],
)
def test_a_request_in_json_tells_its_tenant_its_class_and_its_targets(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line % '"tenant": "ann", "class": "chat", "tpot_target_seconds": 0.5')
    (request,) = read_trace(path)
    assert (request.tenant, request.request_class) == ("ann", "chat")
    assert [getattr(request, target) for target in TARGETS] == [None, 0.5, None]
    path.write_text(line % '"deadline_seconds": 0')
    with pytest.raises(TraceError, match="deadline_seconds"):
        read_trace(path)
