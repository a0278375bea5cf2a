"""Measures how many chunks a second `aioserve bench serve` can read without being late.

    python benchmarks/load_generator.py

A server in a process of its own, which computes nothing, streams completions of one token a chunk
to so many requests at once. Only the processor time of the load generator for each chunk counts:
other work of the machine makes it wait, but takes none of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from http_client import running

from aioserve.cli._http_load.measure import measure_server
from aioserve.cli._http_load.options import LoadOptions, requests_of


def main() -> None:
    options = parse_arguments()
    if options.serve:
        running()(serve(options.output_tokens))
        return
    command = [sys.executable, str(Path(__file__)), "--serve"]
    command += ["--output-tokens", str(options.output_tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            print(measured(server.stdout.readline().strip(), options))
        finally:
            server.kill()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(url: str, options: argparse.Namespace) -> str:
    load = LoadOptions(
        model="fake",
        vocab_size=1000,
        num_requests=options.requests,
        concurrency=options.streams,
        output_len=options.output_tokens,
    )
    began = time.process_time()
    metrics = running()(measure_server(url, requests_of(None, load), load, None)).metrics
    seconds = time.process_time() - began
    assert metrics.finished == options.requests, metrics.failures
    each = seconds / metrics.output_tokens
    return (
        f"{metrics.output_tokens:,} chunks of {options.requests:,} streams, {options.streams} at "
        f"once: {each * 1e6:.1f} us of a processor each, all else included, so at most "
        f"{1 / each:,.0f} a second; here {metrics.output_tokens_per_second:,.0f} a second came, "
        f"busy {metrics.generator.busy_share:.0%} of the time"
    )


async def serve(output_tokens: int) -> None:
    """Print the URL, and answer until the process is ended."""
    chunk = _event({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
    usage = {"prompt_tokens": 1, "completion_tokens": output_tokens}
    last = _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    last += _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields[b"content-length"]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    b"transfer-encoding: chunked\r\n\r\n"
                )
                for _ in range(output_tokens):
                    writer.write(_framed(chunk))
                    await asyncio.sleep(0.001)  # each token in a packet of its own
                writer.write(_framed(last) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


if __name__ == "__main__":
    main()
