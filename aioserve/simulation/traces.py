"""Request traces: who came when, how long prompt and answer were, which blocks were shared.

Traces hold no text. A prompt is a list of block ids, and equal ids stand for equal tokens behind
equal tokens: KV that can be reused. `prompt_ids` makes tokens out of them.

Two formats, one JSON value a line, plain or `.gz` (for those with a header line, see
`csv_traces.py`):

- Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`,
  one id per 512 tokens, the last block perhaps partial. Ids are global.
- Agentic sessions (kv-cache-tester): one session of a coding agent, `id`, `block_size`, `requests`;
  a request has `t` in seconds since its agent began, `in`, `out` and `hash_ids`, one per whole
  block. Ids are local to the session. An entry may be a sub-agent with `requests` of its own.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import TraceError

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceRequest", "read_agentic", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKEN = np.iinfo(np.int32).max

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Row = TypeVar("Row")


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    number: int
    """Position in the trace, from 0."""
    arrival_seconds: float
    """Since the trace began; of one in sessions, since its session began."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Ids of the prompt's blocks, from position 0. The last block is partial where they cover more
    tokens than the prompt has; where they cover fewer, the rest is a partial block without id."""
    block_tokens: int
    session: str = ""
    """Ids are equal only within a session."""
    client: str = ""
    """Who sent it, where the trace tells."""

    @property
    def own_token(self) -> int:
        """The token of this request alone: what no other prompt shares is made of it."""
        return MAX_TOKEN - self.number

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """A prompt of the recorded length: int32 `[prompt_tokens]`.

        Blocks with equal ids are equal, and no token of one block is in another. The rest without
        id is this request's alone. Raises `TraceError` for an id without room among int32 tokens.
        """
        check_ids(f"request {self.number}", self)
        first = np.array(self.block_ids, np.int64) * self.block_tokens
        tokens = np.full(self.prompt_tokens, self.own_token, np.int32)
        blocks = (first[:, None] + np.arange(self.block_tokens)).reshape(-1)[: self.prompt_tokens]
        tokens[: len(blocks)] = blocks
        return tokens


def read_mooncake(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Mooncake's format, as they are in it. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for place, row in rows_of(Path(path), MooncakeRow):
        request = TraceRequest(
            len(requests),
            row.timestamp / 1000,
            row.input_length,
            row.output_length,
            row.hash_ids,
            MOONCAKE_BLOCK_TOKENS,
        )
        check_blocks(place, request)
        requests.append(request)
    return requests


def read_agentic(path: str | Path) -> list[TraceRequest]:
    """Requests of a file of agentic sessions: session by session, in each by time, those of
    sub-agents among them. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for place, session in rows_of(Path(path), AgenticSession):
        flat = sorted(flattened(session.requests, 0.0), key=attrgetter("t"))
        for entry in flat:
            request = TraceRequest(
                len(requests),
                entry.t,
                entry.input_tokens,
                entry.output_tokens,
                entry.hash_ids,
                session.block_size,
                session.id,
            )
            check_blocks(place, request)
            requests.append(request)
    return requests


class MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Seconds
    input_length: Positive
    output_length: Count
    hash_ids: tuple[Count, ...]


class AgenticRequest(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="n",
    rename={"input_tokens": "in", "output_tokens": "out"},
):
    t: Seconds
    input_tokens: Positive
    output_tokens: Count
    hash_ids: tuple[Count, ...]


class StreamedAgenticRequest(AgenticRequest, frozen=True, tag="s"):
    """One whose answer was streamed; otherwise the same."""


class SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: tuple[AgenticRequest | StreamedAgenticRequest | SubAgent, ...]


class AgenticSession(msgspec.Struct, frozen=True):
    id: str
    block_size: Positive
    hash_id_scope: Literal["local"]
    requests: tuple[AgenticRequest | StreamedAgenticRequest | SubAgent, ...]


def flattened(
    entries: tuple[AgenticRequest | StreamedAgenticRequest | SubAgent, ...], began: float
) -> Iterator[AgenticRequest]:
    """The requests of an agent that began at `began`, and of its sub-agents, in session time."""
    for entry in entries:
        if isinstance(entry, SubAgent):
            yield from flattened(entry.requests, began + entry.t)
        else:
            yield msgspec.structs.replace(entry, t=began + entry.t)


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """`file:line` and the text of every line, with its end but without a byte order mark. Raises
    `TraceError` for a file that can't be read."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a whole gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def rows_of(path: Path, row: type[Row]) -> Iterator[tuple[str, Row]]:
    """`file:line` and the value of every line that isn't blank."""
    decoder = msgspec.json.Decoder(row)
    for place, line in lines_of(path):
        if not line.strip():
            continue
        try:
            value = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{place}: {error}") from error
        yield place, value


def check_blocks(place: str, request: TraceRequest) -> None:
    """Raise unless the ids have room among int32 tokens, and are as many as the prompt has blocks,
    a partial one counted or not."""
    check_ids(place, request)
    whole, rest = divmod(request.prompt_tokens, request.block_tokens)
    if len(request.block_ids) not in (whole, whole + (rest > 0)):
        raise TraceError(
            f"{place}: {len(request.block_ids)} hash_ids, but a prompt of "
            f"{request.prompt_tokens} tokens has {whole} whole blocks of {request.block_tokens}"
            f"{' and a partial one' if rest else ''}"
        )


def check_ids(place: str, request: TraceRequest) -> None:
    most = request.own_token // request.block_tokens - 1
    for block_id in request.block_ids:
        if not 0 <= block_id <= most:
            raise TraceError(
                f"{place}: block_ids must be 0 to {most} with blocks of {request.block_tokens} for "
                f"int32 tokens, got {block_id}"
            )
