"""A good file, and what may become of it on its way: values replaced, bytes turned, lines cut."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from tests.attacks.hostile import HUGE_INTS, hostile_json, hostile_texts

__all__ = ["little_memory", "mutated"]

NUMBERS = ["-1", "0", "1e308", "1e400", "nan", "inf", "-inf", "1_0", "0x10", "٣", "1.5", "9" * 5000]
NUMBERS += [str(value) for value in HUGE_INTS if value < 10**4000]
DEEP = 20_000


@contextmanager
def little_memory(more_bytes: int = 3 << 30) -> Iterator[None]:
    """Limit the memory of the block to `more_bytes` beyond what is in use now. Beyond that it gets
    a MemoryError, and the machine is spared."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """Draw a text file with a few mutations, one after the other, perhaps packed as gzip."""
    steps = st.lists(
        st.sampled_from([_value, _value, _value, _byte, _cut, _nested, _swapped, _marked]),
        min_size=1,
        max_size=3,
    )
    return st.builds(_apply, st.just(data), steps, st.data())


def _apply(data: bytes, steps: list[Any], drawn: st.DataObject) -> bytes:
    for step in steps:
        data = step(data, drawn.draw)
    return data


def _value(data: bytes, draw: Any) -> bytes:
    """Replace one value of one line: of its JSON, or between its commas."""
    lines = data.split(b"\n")
    index = draw(st.integers(0, max(0, len(lines) - 2)))
    try:
        row = json.loads(lines[index])
    except (ValueError, RecursionError):
        columns = lines[index].split(b",")
        text = draw(st.one_of(st.sampled_from(NUMBERS), hostile_texts()))
        place = draw(st.integers(0, len(columns) - 1))
        columns[place] = text.encode("utf-8", "surrogatepass")
        lines[index] = b",".join(columns)
    else:
        lines[index] = json.dumps(_replaced(row, draw), ensure_ascii=draw(st.booleans())).encode(
            "utf-8", "surrogatepass"
        )
    return b"\n".join(lines)


def _replaced(value: Any, draw: Any) -> Any:
    """Return the value with something hostile at one place in it."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(hostile_json())
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    if draw(st.integers(0, 9)) == 0:
        del changed[key]
    else:
        changed[key] = _replaced(value[key], draw)
    return changed


def _byte(data: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, max(0, len(data) - 1)))
    return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]


def _cut(data: bytes, draw: Any) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def _nested(data: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, len(data)))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"requests":[', b"]}"), (b'"', b"")]))
    return data[:at] + opening * DEEP + closing * draw(st.sampled_from([0, DEEP])) + data[at:]


def _swapped(data: bytes, draw: Any) -> bytes:
    lines = data.split(b"\n")
    one, other = draw(st.tuples(*[st.integers(0, len(lines) - 1)] * 2))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _marked(data: bytes, draw: Any) -> bytes:
    """Return the file with a byte order mark, in another encoding, or packed, whole or cut."""
    packed = gzip.compress(data, 1, mtime=0)
    return draw(
        st.sampled_from(
            [
                b"\xef\xbb\xbf" + data,
                data.decode("utf-8", "replace").encode("utf-16"),
                packed,
                packed[: len(packed) // 2],
            ]
        )
    )
