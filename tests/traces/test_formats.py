"""Formats with a header line, and which format a file has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from aioserve.errors import TraceError
from aioserve.traces.formats import read_azure, read_servegen, read_trace
from aioserve.traces.trace_request import TraceRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_SECONDS = "arrival_s,context_tokens,generated_tokens\n"
SERVEGEN = "arrival_s,client,input_tokens,output_tokens\n"


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azures_times_count_from_the_first(tmp_path: Path, name: str) -> None:
    path = written(
        tmp_path / name,
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n\n2023-11-16 18:15:50.9951690,396,0\n",
    )
    first, second = read_azure(path)
    assert first == TraceRequest(0, 0.0, 374, 44, (), 374)
    assert second.arrival_seconds == pytest.approx(4.314579)
    assert (second.number, second.prompt_tokens, second.output_tokens) == (1, 396, 0)


def test_azures_times_may_be_seconds(tmp_path: Path) -> None:
    path = written(tmp_path / "azure.csv", AZURE_SECONDS + "0.0,4808,10\n0.052,3180,8\n")
    assert [r.arrival_seconds for r in read_azure(path)] == [0.0, 0.052]


def test_servegens_clients_are_kept_and_further_columns_passed_over(tmp_path: Path) -> None:
    path = written(
        tmp_path / "servegen.csv",
        SERVEGEN.replace("\n", ",reason_ratio\n") + "0.5,23,242,587,0.862\n",
    )
    (request,) = read_servegen(path)
    assert request == TraceRequest(0, 0.5, 242, 587, (), 242, tenant="23")
    assert set(request.prompt_ids()) == {request.own_token}


def test_the_callers_limit_is_read_where_there_is_one(tmp_path: Path) -> None:
    text = AZURE_SECONDS.replace("\n", ",max_tokens\n") + "0.0,10,5,256\n1.0,10,5,\n"
    path = written(tmp_path / "azure.csv", text)
    assert [r.max_tokens for r in read_azure(path)] == [256, None]
    text = SERVEGEN.replace("\n", ",max_tokens\n") + "0.0,a,10,5,7\n"
    assert read_servegen(written(tmp_path / "servegen.csv", text))[0].max_tokens == 7
    path = written(tmp_path / "a.csv", text.replace("7", "0"))
    with pytest.raises(TraceError, match=r"a.csv:2: max_tokens must be .* at least 1, got '0'"):
        read_servegen(path)


def test_a_forecast_is_read_where_there_is_one(tmp_path: Path) -> None:
    text = AZURE_SECONDS.replace("\n", ",predicted_output_tokens\n") + "0.0,10,5,8\n1.0,10,5,\n"
    path = written(tmp_path / "azure.csv", text)
    assert [r.predicted_output_tokens for r in read_azure(path)] == [8, None]
    text = SERVEGEN.replace("\n", ",predicted_output_tokens\n") + "0.0,a,10,5,7\n"
    assert read_servegen(written(tmp_path / "s.csv", text))[0].predicted_output_tokens == 7
    path = written(tmp_path / "a.csv", text.replace("7", "-1"))
    with pytest.raises(TraceError, match=r"a.csv:2: predicted_output_tokens must be .* at least 1"):
        read_servegen(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "a.csv:1: the columns must begin with TIMESTAMP"),
        ("", "a.csv:1: the columns must begin"),
        (AZURE_SECONDS + "0.0,10\n", "a.csv:2: 2 values in a file of 3 columns"),
        (
            AZURE_SECONDS + "0.0,0,1\n",
            "a.csv:2: context_tokens must be a whole number of at least 1, got '0'",
        ),
        (
            AZURE_SECONDS + "0.0,1,-1\n",
            "generated_tokens must be a whole number of at least 0, got '-1'",
        ),
        (AZURE_SECONDS + "0.0,1,1.5\n", "a whole number of at least 0, got '1.5'"),
        (AZURE_SECONDS + "0.0,inf,1\n", "a whole number of at least 1, got 'inf'"),
        (AZURE_SECONDS + "0.0,,1\n", "a whole number of at least 1, got ''"),
        (AZURE_SECONDS + "-1,1,1\n", "arrival_s must be seconds from 0 on, got '-1'"),
        (AZURE_SECONDS + "nan,1,1\n", "arrival_s must be seconds from 0 on, got 'nan'"),
        (AZURE + "yesterday,1,1\n", "TIMESTAMP must be a date and time, got 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", "is before the first"),
        (
            AZURE + "2024-05-10 00:00:00,1,1\n2024-05-10 00:00:01+00:00,1,1\n",
            "a.csv:3: TIMESTAMP 2024-05-10 00:00:01+00:00 and the first, 2024-05-10 00:00:00,",
        ),
        (AZURE + "2024-05-10 00:00:00Z,1,1\n2024-05-10 00:00:01,1,1\n", "one has a time zone"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as raised:
        read_azure(written(tmp_path / "a.csv", text))
    assert message in str(raised.value)


def test_the_line_of_what_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    row = b"0.0,1,1\n"
    path.write_bytes(AZURE_SECONDS.encode() + row + b"0.0,\xff,1\n" + row * 2000)
    with pytest.raises(TraceError, match=r"a.csv:3: 'utf-8' codec can't decode"):
        read_azure(path)
    path.write_bytes(AZURE_SECONDS.encode() + row * 2 + b"9" * 200_000 + b"\n")
    with pytest.raises(TraceError, match=r"a.csv:4: field larger than"):
        read_azure(path)


def test_blank_lines_before_the_columns_are_passed_over(tmp_path: Path) -> None:
    text = "\n \n" + AZURE_SECONDS + "\n0.0,1,1\n  \n"
    assert len(read_trace(written(tmp_path / "a.csv", text))) == 1
    with pytest.raises(TraceError, match=r"a.csv:3: the columns must begin with arrival_s,client"):
        read_servegen(tmp_path / "a.csv")


MOONCAKE = '{"timestamp": 5, "input_length": 513, "output_length": 7, "hash_ids": [0, 4]}\n'


@pytest.mark.parametrize("name", ["trace", "trace.gz"])
@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("\ufeff" + MOONCAKE, 513),
        ("  " + MOONCAKE, 513),
        ("\ufeff\n\t" + MOONCAKE, 513),
        ("\ufeff" + AZURE_SECONDS + "0.0,600,10\n", 600),
        ('"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2024-05-10 00:00:00","374","44"\n', 374),
        ('arrival_s, "client", input_tokens , output_tokens\r\n 0.0, "a, b", 601, 10\r\n', 601),
        (" " + AZURE + " 2024-05-10 00:00:00 , 374 , 44\n", 374),
        (AZURE_SECONDS + "0.0,10.0,7.0\n", 10),
        (AZURE_SECONDS + "0.0,1e3,0.0\n", 1000),
    ],
)
def test_a_trace_may_be_written_in_other_ways(
    tmp_path: Path, text: str, prompt: int, name: str
) -> None:
    (request,) = read_trace(written(tmp_path / name, text))
    assert (request.arrival_seconds, request.prompt_tokens) == (0.0, prompt)
    assert request.tenant in ("", "a, b")


@pytest.mark.parametrize(
    ("lines", "ends"),
    [
        ([MOONCAKE.replace("5,", f"{1_700_000_000_000 + t},", 1) for t in (250, 0, 1250)], 1.25),
        ([AZURE_SECONDS, "1700000000.5,1,1\n", "1700000000.0,2,1\n"], 0.5),
        ([SERVEGEN, "9.0,a,1,1\n", "7.5,b,1,1\n", "8.0,a,1,1\n"], 1.5),
        ([AZURE, "2024-05-10 00:00:00Z,1,1\n", "2024-05-10 01:00:03+01:00,1,1\n"], 3.0),
    ],
)
def test_a_trace_begins_with_its_first_arrival(
    tmp_path: Path, lines: list[str], ends: float
) -> None:
    trace = read_trace(written(tmp_path / "trace", "".join(lines)))
    arrivals = [request.arrival_seconds for request in trace]
    assert arrivals == sorted(arrivals)
    assert (arrivals[0], arrivals[-1]) == (0.0, ends)
    assert [request.number for request in trace] == list(range(len(trace)))


def test_the_first_requests_of_sessions_are_the_first_by_time(tmp_path: Path) -> None:
    entry = {"type": "n", "in": 64, "out": 3, "hash_ids": [1]}
    session = {"block_size": 64, "hash_id_scope": "local"}
    text = "".join(
        json.dumps(session | {"id": id, "requests": [entry | {"t": t} for t in times]}) + "\n"
        for id, times in {"a": (2.0, 4.0, 9.0), "b": (3.0, 5.0), "c": (2.0,)}.items()
    )
    trace = read_trace(written(tmp_path / "sessions.jsonl", text))
    assert [(r.session, r.arrival_seconds) for r in trace[:4]] == [
        ("a", 0.0),
        ("c", 0.0),
        ("b", 1.0),
        ("a", 2.0),
    ]


def test_a_file_that_cannot_be_read_is_no_trace(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "missing.csv", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceError, match=f"^{path}: {why}"):
            read_trace(path)


def test_half_a_gzip_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress((AZURE_SECONDS + "0.0,4808,10\n" * 50).encode())[:40])
    for read in (read_azure, read_trace):
        with pytest.raises(TraceError, match="not a whole gzip file"):
            read(path)


def test_the_first_line_tells_the_format(tmp_path: Path) -> None:
    entry = {"t": 0.0, "type": "n", "in": 70, "out": 3, "hash_ids": [1]}
    session = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [entry]}
    row = {"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [0, 4]}
    texts = {
        "mooncake": json.dumps(row),
        "agentic": json.dumps(session),
        "azure": AZURE_SECONDS + "0.0,600,10",
        "servegen": SERVEGEN + "0.0,tom,601,10",
    }
    read = {
        name: read_trace(written(tmp_path / f"{name}.gz", text))[0] for name, text in texts.items()
    }
    assert {name: r.prompt_tokens for name, r in read.items()} == {
        "mooncake": 513,
        "agentic": 70,
        "azure": 600,
        "servegen": 601,
    }
    assert read["agentic"].session == "a"
    assert read["servegen"].tenant == "tom"


@pytest.mark.parametrize("text", ["hello\n", "\ufffd"])
def test_other_files_are_no_traces(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="other:1: not the beginning of a known format") as caught:
        read_trace(written(tmp_path / "other", text))
    assert str(caught.value).endswith(repr(text.strip()))


def test_lines_of_json_are_told_which_fields_they_miss(tmp_path: Path) -> None:
    path = written(tmp_path / "other", '{"prompt": "x"}\n')
    with pytest.raises(TraceError, match="misses the fields timestamp, input_length, "):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "\n\n", SERVEGEN])
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(written(tmp_path / "empty.csv", text))


@pytest.mark.parametrize("name", ["input_tokens", "max_tokens"])
def test_a_column_is_there_once(tmp_path: Path, name: str) -> None:
    text = f"{SERVEGEN.strip()},max_tokens,{name}\n0,a,1,1,2,3\n"
    with pytest.raises(TraceError, match=f":1: 2 columns are called '{name}'"):
        read_trace(written(tmp_path / "a.csv", text))
