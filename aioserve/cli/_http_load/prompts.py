"""Prompts for the requests of a trace, which holds no text: token ids or words, drawn from a seed.

Prompts have equal blocks exactly where the trace has equal blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from aioserve.traces.trace_request import TraceRequest

__all__ = ["WORDS", "drawn_prompt"]

T = TypeVar("T")

_LINES = (
    "about above after again age air all also always and animal another answer any area arm",
    "around art ask back bad ball bank bar base bed before began best better big bird black",
    "blue board boat body book both box boy bring brother build burn business but call came",
    "can car care carry case cat cause center change child city class clear close cold color",
    "come common complete contain cool copy corner cost could count country course cover",
    "cross cry cut dark day dead deal deep did different direct do dog done door down draw",
    "dream drive dry each ear early earth east easy eat edge effect eight end energy engine",
    "enough even evening event ever every example eye face fact fall family far farm fast",
    "father feel few field fight figure fill final find fine finger fire first fish five",
    "floor fly follow food foot for force forest form found four free fresh friend from front",
    "full game garden gave general get girl give glass go gold gone good got govern grand",
    "great green ground group grow had half hand happen happy hard has hat have he head hear",
    "heart heat heavy help her here high hill him his history hold home hope horse hot hour",
    "house how human",
)
WORDS = tuple(word for line in _LINES for word in line.split())
"""Words that most vocabularies have, with a space in front, as one token."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def drawn_prompt(request: TraceRequest, alphabet: Sequence[T], seed: int) -> list[T]:
    """Return as many items of `alphabet` as the request's prompt has tokens.

    Each item depends on the seed, its place, the request's session and the trace's token there.
    """
    tokens = request.prompt_ids().astype(np.uint64)
    name = f"{seed} {request.session}".encode("utf-8", "surrogatepass")
    key = np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), np.uint64)
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64) * _STEP
    drawn = _mixed(_mixed(tokens + key) + places) % np.uint64(len(alphabet))
    return [alphabet[index] for index in drawn.tolist()]


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finaliser of SplitMix64, by which each bit of a value affects all bits of the
    result.

    See Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])
