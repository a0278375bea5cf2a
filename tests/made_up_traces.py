"""Small made-up files in the formats of the recorded traces, which are not in the repository.

Each function writes one kind of file and returns its path; the same call writes the same file. The
files have those traits of recorded traces that matter to the tests. Prompts begin alike, arrivals
come in bursts, tenants differ in size, agents have sub-agents, and numbers are written as text.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["agentic", "azure", "mooncake", "servegen", "share_seen_before", "splitwise"]

MOONCAKE_BLOCK_TOKENS = 512
AGENTIC_BLOCK_TOKENS = 64


def mooncake(directory: Path, *, num_conversations: int = 40) -> Path:
    """Conversations of up to six turns, each turn's prompt the one before and some blocks more,
    behind one of three system prompts."""
    draw = random.Random(1)
    rows: list[dict[str, Any]] = []
    next_id = 30
    for _ in range(num_conversations):
        system = draw.choice([0, 0, 0, 10, 20])
        ids = list(range(system, system + 4))
        at_milliseconds = draw.uniform(0, 60_000)
        for _ in range(draw.randint(1, 6)):
            grown = draw.randint(1, 6)
            ids += range(next_id, next_id + grown)
            next_id += grown + 1
            rest = draw.randrange(1, MOONCAKE_BLOCK_TOKENS)
            rows.append(
                {
                    "timestamp": round(at_milliseconds),
                    "input_length": len(ids) * MOONCAKE_BLOCK_TOKENS + rest,
                    "output_length": draw.randint(1, 300),
                    # What ends within a block has an id of its own.
                    "hash_ids": [*ids, next_id - 1],
                }
            )
            at_milliseconds += draw.uniform(5_000, 30_000)
    rows.sort(key=lambda row: row["timestamp"])
    return _written(directory / "made_up_mooncake.jsonl.gz", map(json.dumps, rows))


def agentic(directory: Path, *, num_sessions: int = 4) -> Path:
    """Sessions of a coding agent whose context grows, the last one with a sub-agent; block ids
    count from 1 in each session."""
    draw = random.Random(2)

    def entries(first_id: int, count: int) -> list[dict[str, Any]]:
        ids, t, found = list(range(first_id, first_id + 20)), 0.0, []
        for _ in range(count):
            rest = draw.randrange(AGENTIC_BLOCK_TOKENS)
            entry = {"t": round(t, 3), "type": draw.choice("ns"), "model": "made-up"}
            entry |= {"in": len(ids) * AGENTIC_BLOCK_TOKENS + rest, "out": draw.randint(1, 200)}
            found.append(entry | {"hash_ids": list(ids), "api_time": 1.5, "stop": "tool_use"})
            ids += range(ids[-1] + 1, ids[-1] + 1 + draw.randint(1, 5))
            t += draw.uniform(1, 20)
        return found

    sessions = []
    for number in range(num_sessions):
        requests = entries(1, draw.randint(10, 20))
        if number == num_sessions - 1:
            requests.insert(3, {"t": 7.5, "type": "subagent", "requests": entries(1000, 5)})
        session = {"id": f"made_up_{number}", "models": ["made-up"], "hash_id_scope": "local"}
        sessions.append(session | {"block_size": AGENTIC_BLOCK_TOKENS, "requests": requests})
    return _written(directory / "made_up_agentic.jsonl.gz", map(json.dumps, sessions))


def azure(directory: Path, *, num_requests: int = 300) -> Path:
    """Code completions: long prompts, short answers, in bursts."""
    draw = random.Random(3)
    lines, t = ["arrival_s,context_tokens,generated_tokens"], 0.0
    for number in range(num_requests):
        t += draw.uniform(4, 8) if number % 60 == 0 else draw.uniform(0, 0.04)
        prompt = min(8000, int(draw.lognormvariate(7.2, 0.9)))
        lines.append(f"{t:.3f},{prompt},{draw.randint(1, 60)}")
    return _written(directory / "made_up_azure.csv.gz", lines)


def servegen(directory: Path, *, num_requests: int = 1500) -> Path:
    """A tenant that sends as much as eight others together, and seldom a very long prompt."""
    draw = random.Random(4)
    lines, t = ["arrival_s,client,input_tokens,output_tokens,reason_ratio"], 0.0
    for number in range(num_requests):
        t += draw.expovariate(100)
        tenant = 0 if draw.random() < 0.5 else draw.randint(1, 8)
        prompt = 12_000 if number == 700 else draw.randint(10, 3000 if tenant == 0 else 400)
        lines.append(f"{t:.3f},{tenant},{prompt},{draw.randint(1, 120)},0.0")
    return _written(directory / "made_up_servegen.csv.gz", lines)


def splitwise(directory: Path) -> Path:
    """Latencies of two models' worth of GPUs; each row three times, every number as text."""
    draw = random.Random(5)
    rows = []
    for hardware, speed in (("a100-80gb", 1.0), ("h100-80gb", 2.0)):
        for devices in (2, 8):
            sizes = [(prompt, 1) for prompt in (128, 512, 1024, 2048, 4096)]
            sizes += [(512, batch) for batch in (2, 4, 8, 16, 32, 64)]
            for prompt, batch in sizes * 3:
                noise = draw.uniform(0.98, 1.02)
                prompt_ms = (10 + 0.6 * prompt * batch / devices) / speed * noise
                token_ms = (40 + 60 / devices + 0.1 * batch) / speed * noise
                row = {"model": "llama2-70b", "hardware": hardware, "prompt_size": prompt}
                row |= {"batch_size": batch, "token_size": 128, "peak_power": 1.0}
                row |= {"prompt_time": prompt_ms, "token_time": token_ms}
                row |= {"e2e_time": prompt_ms + 128 * token_ms, "tensor_parallel": devices}
                rows.append(json.dumps({name: str(value) for name, value in row.items()}))
    return _written(directory / "made_up_splitwise.jsonl.gz", rows)


def share_seen_before(path: Path) -> float:
    """The share of blocks of a file of `mooncake` or `agentic` that an earlier request of the
    session had, behind the same blocks. Counted from the file itself and with a set, and so without
    the reader of traces and without a prefix tree."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    num_blocks = 0
    for number, line in enumerate(gzip.decompress(path.read_bytes()).splitlines()):
        row = json.loads(line)
        session = number if "requests" in row else 0
        for ids in _prompts(row):
            num_blocks += len(ids)
            seen |= {(session, ids[:end]) for end in range(1, len(ids) + 1)}
    return 1 - len(seen) / num_blocks


def _prompts(row: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    if "hash_ids" in row:
        yield tuple(row["hash_ids"])
    for entry in row.get("requests", ()):
        yield from _prompts(entry)


def _written(path: Path, lines: Iterable[str]) -> Path:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    return path
