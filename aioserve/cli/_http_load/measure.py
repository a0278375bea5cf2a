"""Measurement of a server: asks for its model, warms it up, sends the load, and computes
figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioserve.cli._engine import frozen_heap
from aioserve.cli._http_load.client import CompletionClient, Endpoint, ServerError
from aioserve.cli._http_load.generator import Load, run_load
from aioserve.cli._http_load.options import LoadOptions, warmups_of
from aioserve.cli._http_load.prompts import WORDS, drawn_prompt
from aioserve.cli._load import LoopLag
from aioserve.progress_bar import bar_on_terminal
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.served import ServedMetrics, ServedRequest, served_metrics_of
from aioserve.traces.trace_request import TraceRequest

__all__ = ["Measured", "measure_server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Results of a load."""

    url: str
    model: str
    requests: Sequence[TraceRequest]
    """Requests as they were to be sent."""
    load: Load
    metrics: ServedMetrics


async def measure_server(
    base_url: str, requests: Sequence[TraceRequest], options: LoadOptions, api_key: str | None
) -> Measured:
    """Send these requests, as checked options say.

    Raises `ServerError` if the server isn't there, tells no model or token ids, or fails a warm-up
    request. Raises `TraceError` if a request of a closed loop follows no earlier one.
    """
    seed = options.seed or 0
    async with CompletionClient(api_key=api_key, timeout_seconds=options.timeout_seconds) as client:
        model = options.model or await client.served_model(base_url)
        alphabet: Sequence[int | str]
        if options.has_text_prompts:
            alphabet = WORDS
        elif options.vocab_size is not None:
            alphabet = range(options.vocab_size)
        else:
            alphabet = await client.ordinary_token_ids(base_url, model)
        endpoint = _endpoint(base_url, model, options)

        def body_of(request: TraceRequest) -> bytes:
            return endpoint.body(request, drawn_prompt(request, alphabet, seed))

        for request in warmups_of(requests, options):
            await _warm_up(client, endpoint, request, body_of(request))
        with frozen_heap(), bar_on_terminal("requests", len(requests)) as on_progress:
            async with LoopLag() as lag:
                load = await run_load(
                    requests,
                    lambda served, body, clock: client.send(served, endpoint, body, clock),
                    body_of,
                    closed_loop=options.closed_loop,
                    concurrency=options.concurrency,
                    max_seconds=options.max_seconds,
                    on_progress=on_progress,
                )
    metrics = served_metrics_of(
        load.served,
        load.seconds,
        loop_lag_seconds=lag.samples,
        busy_share=load.busy_share,
    )
    return Measured(url=base_url, model=model, requests=requests, load=load, metrics=metrics)


def _endpoint(base_url: str, model: str, options: LoadOptions) -> Endpoint:
    return Endpoint(
        base_url=base_url,
        kind=options.endpoint,
        model=model,
        ignore_eos=options.ignore_eos,
        return_token_ids=options.return_token_ids,
        hints=options.hints,
    )


async def _warm_up(
    client: CompletionClient, endpoint: Endpoint, request: TraceRequest, body: bytes
) -> None:
    served = ServedRequest(RequestRecord(request))
    await client.send(served, endpoint, body)
    if served.failure:
        raise ServerError(
            f"{endpoint.url}: a warm-up request failed, so no load was sent: {served.failure}: "
            f"{served.detail}"
        )
