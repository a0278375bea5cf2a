"""A load generator with a server that misbehaves: all is counted, and nothing raised."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from msgspec.structs import replace

from aioserve.cli._http_load.client import CompletionClient, Endpoint, ServerError, base_url_of
from aioserve.errors import ConfigError
from aioserve.simulation.metrics import tpot_seconds, ttft_seconds
from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.served import ServedRequest
from aioserve.traces.trace_request import TraceRequest
from tests.cli.http_load.misbehaving import Then, answering, chunk, event
from tests.tiers import clock_counts
from tests.waits import LIMIT_SECONDS

pytestmark = pytest.mark.asyncio

ASKED = TraceRequest(0, 0.0, 7, 3, (), 7)
DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
TOKENS = (chunk("a"), chunk("b"), chunk("c", "length"))


async def sent_to(
    url: str, *, timeout_seconds: float = LIMIT_SECONDS, **options: object
) -> ServedRequest:
    served = ServedRequest(RequestRecord(ASKED))
    endpoint = Endpoint(base_url=url, model="m", **options)  # type: ignore[arg-type]
    async with CompletionClient(timeout_seconds=timeout_seconds) as client:
        await client.send(served, endpoint, endpoint.body(ASKED, [5, 6, 7]))
    return served


async def test_an_answer_is_counted_as_the_server_counts_it() -> None:
    async with answering(*TOKENS, USAGE, DONE) as (url, bodies):
        served = await sent_to(url)
    record = served.record
    assert (served.failure, record.ending) == ("", Ending.FINISHED)
    assert (record.output_tokens, record.request.prompt_tokens) == (3, 9)
    assert served.has_usage
    assert served.chunks == 3
    assert len(served.gap_seconds) == 2
    ttft = ttft_seconds(record)
    assert ttft is not None
    assert record.first_token_seconds is not None
    assert record.end_seconds is not None
    assert record.end_seconds >= record.first_token_seconds
    assert bodies == [
        {
            "model": "m",
            "prompt": [5, 6, 7],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_is_no_failure_of_the_server(status: int) -> None:
    told = b'{"error": {"message": "too many\\nrequests"}}'
    async with answering(told, status=status, content_type="application/json") as (url, _):
        served = await sent_to(url)
    assert served.record.ending is Ending.REFUSED
    assert served.failure == f"status {status}"
    assert served.detail == "too many requests"
    assert ttft_seconds(served.record) is None


@pytest.mark.parametrize("status", [400, 401, 404, 500, 502])
async def test_an_error_status_is_a_failure(status: int) -> None:
    async with answering(b"<h1>no</h1>", status=status, content_type="text/html") as (url, _):
        served = await sent_to(url)
    assert served.record.ending is Ending.FAILED
    assert (served.failure, served.detail) == (f"status {status}", "<h1>no</h1>")


async def test_a_connection_that_is_reset_half_way_is_a_stream_cut_off() -> None:
    async with answering(TOKENS[0], TOKENS[1], Then.DROP) as (url, _):
        served = await sent_to(url)
    assert served.record.ending is Ending.FAILED
    assert served.failure in ("cut off", "no answer")  # a reset may overtake what was sent
    assert served.record.end_seconds is not None


async def test_a_stream_that_ends_too_early_in_good_order_is_cut_off() -> None:
    async with answering(TOKENS[0], TOKENS[1]) as (url, _):
        served = await sent_to(url)
    assert (served.failure, served.record.ending) == ("cut off", Ending.FAILED)
    assert served.record.output_tokens == 2
    assert ttft_seconds(served.record) is not None
    assert tpot_seconds(served.record) is None


async def test_a_connection_that_is_reset_before_anything_comes_gave_no_answer() -> None:
    async with answering(Then.DROP) as (url, _):
        served = await sent_to(url)
    assert (served.failure, served.record.ending) == ("no answer", Ending.FAILED)


async def test_where_nobody_listens_there_is_no_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        served = await sent_to(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert (served.failure, served.record.ending) == ("no connection", Ending.FAILED)


@pytest.mark.clock
@pytest.mark.parametrize("before", [(), (TOKENS[0],)])
async def test_a_server_that_hangs_runs_into_the_timeout(before: tuple[bytes, ...]) -> None:
    async with answering(*before, Then.HANG) as (url, _):
        served = await sent_to(url, timeout_seconds=0.3)
    assert (served.failure, served.record.ending) == ("timeout", Ending.FAILED)
    assert served.detail == "no end in 0.3 s"
    assert served.chunks == len(before) or not clock_counts()  # pieces that came within this time


async def test_an_error_within_the_stream_is_a_failure_though_the_stream_ends_well() -> None:
    error = event({"error": {"message": "out of memory"}})
    async with answering(TOKENS[0], error, DONE) as (url, _):
        served = await sent_to(url)
    assert (served.failure, served.record.ending) == ("error in the stream", Ending.FAILED)
    assert "out of memory" in served.detail


async def test_what_went_wrong_first_is_told() -> None:
    error = event({"error": "out of memory"})
    async with answering(error, b"data: {]\n\n") as (url, _):
        served = await sent_to(url)
    assert (served.failure, served.detail) == ("error in the stream", "out of memory")


async def test_what_is_no_stream_of_chunks_is_a_failure() -> None:
    async with answering(b'{"choices": []}', content_type="application/json") as (url, _):
        assert (await sent_to(url)).failure == "no stream"
    async with answering(b"data: {]\n\n", DONE) as (url, _):
        assert (await sent_to(url)).failure == "unreadable"


async def test_without_usage_chunks_are_counted_and_it_is_told() -> None:
    async with answering(chunk("a b"), chunk("c"), chunk("", "length"), DONE) as (url, _):
        served = await sent_to(url)
    assert not served.has_usage
    assert served.record.output_tokens == served.chunks == 2
    assert served.record.request.prompt_tokens == ASKED.prompt_tokens
    assert served.record.ending is Ending.CUT_SHORT


async def test_a_chunk_of_several_tokens_is_one_chunk() -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    async with answering(chunk("a b"), chunk(" c", "length"), usage, DONE) as (url, _):
        served = await sent_to(url)
    assert (served.record.output_tokens, served.chunks, len(served.gap_seconds)) == (3, 2, 1)


async def test_an_empty_chunk_is_no_token() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    async with answering(role, chunk(""), chunk("", "stop"), USAGE, DONE) as (url, _):
        served = await sent_to(url)
    assert served.chunks == 0
    assert served.record.ending is Ending.FINISHED
    assert served.record.first_token_seconds is None
    assert served.record.output_tokens == 3


async def test_ids_of_tokens_are_tokens_without_a_text_too() -> None:
    ids = [event({"choices": [{"index": 0, "text": "", "token_ids": [1, 2]}]}), chunk("", "length")]
    async with answering(*ids, DONE) as (url, bodies):
        served = await sent_to(url, return_token_ids=True)
    assert bodies[0]["return_token_ids"] is True
    assert (served.record.output_tokens, served.chunks) == (2, 1)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"refusal": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
async def test_all_that_a_model_says_in_a_chat_is_tokens(delta: dict[str, object]) -> None:
    said = event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    async with answering(said, end, DONE) as (url, _):
        served = await sent_to(url, kind="chat")
    assert (served.failure, served.chunks) == ("", 1)


async def test_a_body_says_what_was_asked_for_and_nothing_else() -> None:
    trace = TraceRequest(
        1, 0.0, 2, 0, (), 2, "s", "c", priority=3, predicted_output_tokens=8, max_tokens=9
    )
    trace = replace(trace, request_class="chat", ttft_target_seconds=1.0, deadline_seconds=9.0)
    endpoint = Endpoint(base_url="http://h", kind="chat", model="m", ignore_eos=False)
    plain = json.loads(endpoint.body(trace, ["two", "words"]))
    assert plain == {
        "model": "m",
        "messages": [{"role": "user", "content": "two words"}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "c",
        "priority": 3,
    }
    hinted = Endpoint(base_url="http://h", model="m", hints=True)
    more = json.loads(hinted.body(trace, ["two", "words"]))
    assert more["prompt"] == "two words"
    assert (more["session_id"], more["predicted_output_tokens"]) == ("s", 8)
    assert (more["metadata"], more["ttft_target_seconds"]) == ({"class": "chat"}, 1.0)
    assert more["deadline_seconds"] == 9.0
    assert "tpot_target_seconds" not in more


async def test_a_server_that_lists_no_model_or_knows_no_tokens_is_told_what_helps() -> None:
    async with (
        answering(b'{"data": []}', content_type="application/json") as (url, _),
        CompletionClient() as client,
    ):
        with pytest.raises(ServerError, match=r"names no model .*give --model"):
            await client.served_model(url)
        with pytest.raises(ServerError, match=r"no token ids .*--vocab-size, or --prompts text"):
            await client.ordinary_token_ids(url, "m")
    async with answering(Then.HANG) as (url, _), CompletionClient(timeout_seconds=0.2) as client:
        with pytest.raises(ServerError, match=r"no answer in 0\.2 s"):
            await client.served_model(url)


async def test_the_model_and_token_ids_are_those_that_the_server_names() -> None:
    async with (
        answering(b'{"data": [{"id": "first"}, {"id": "second"}]}') as (url, _),
        CompletionClient(api_key="secret") as client,
    ):
        assert await client.served_model(url) == "first"
    async with answering(b'{"tokens": [7, 5, 7]}') as (url, bodies), CompletionClient() as client:
        assert await client.ordinary_token_ids(url, "m") == [5, 7]
    assert bodies[0]["add_special_tokens"] is False


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:80", "ftp://host", "http://", "http://a b", "http://h:99999", "http://[::1"),
        *("http://user:secret@h", "http://h?x=1", "http://h#x", "http://h:0", "http:///v1"),
    ],
)
async def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be http://HOST:PORT"):
        base_url_of(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
async def test_an_address_may_end_in_the_version(url: str) -> None:
    assert base_url_of(url) == "http://h:1"


@pytest.mark.parametrize("url", ["https://gate.example/models/one", "http://[::1]:8000"])
async def test_an_address_may_have_a_path_or_be_of_ipv6(url: str) -> None:
    assert base_url_of(f"{url}/v1") == url


HOSTILE: dict[str, tuple[tuple[bytes | Then, ...], str]] = {
    "a line without an end": ((b"data: " + b"x" * 2**20,) * 9, "a line has more than 8388608"),
    "counts below 0": ((event({"usage": {"completion_tokens": -5}}),), ">= 0"),
    "counts beyond bounds": ((b'data: {"usage": {"prompt_tokens": 1' + b"0" * 400 + b"}}\n",), ""),
    "nests": ((b'data: {"error":' + b"[" * 10**5 + b"]" * 10**5 + b"}\n\n",), "nested too deep"),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_stream_that_is_no_stream_of_chunks_is_unreadable(case: str) -> None:
    pieces, reason = HOSTILE[case]
    async with answering(*pieces, *TOKENS, DONE) as (url, _):
        served = await sent_to(url)
    assert (served.failure, served.record.ending) == ("unreadable", Ending.FAILED)
    assert reason in served.detail


async def test_a_redirection_is_told_and_not_followed() -> None:
    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        served = await sent_to(url)
        async with CompletionClient() as client:
            with pytest.raises(ServerError, match="status 302: it redirects to /x"):
                await client.served_model(url)
    assert (served.failure, served.detail) == ("status 302", "it redirects to /x")


async def test_answers_about_the_server_are_read_up_to_a_bound_and_an_odd_one_is_no_answer() -> (
    None
):
    async with CompletionClient() as client:
        async with answering(*[b"[" * 2**20] * 20, content_type="application/json") as (url, _):
            with pytest.raises(ServerError, match="more than 16777216 bytes"):
                await client.served_model(url)
        deep = b'{"tokens": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"
        for answer in (deep, json.dumps({"tokens": [10**30, -5, 2**31]}).encode()):
            async with answering(answer, content_type="application/json") as (url, _):
                with pytest.raises(ServerError, match="gives no token ids"):
                    await client.ordinary_token_ids(url, "m")
