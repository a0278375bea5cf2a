"""Packs a step to bytes, for a worker in another process than its host.

No engine starts such a worker yet.

    numbers   int64: the step, whether it has a batch and log-probabilities, and the sizes of arrays
    arrays    in the order of `FIELDS`, each at a multiple of 8 bytes

The sizes determine where each array begins, so all workers can read the same bytes. A worker in the
process of its host gets the arrays themselves.

Edits of logits are state of their slots, and stay with the worker that draws. Draft tokens to
verify stay with the host, which accepts them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.step_arrays import StepArrays
from aioserve.ops import HostBatch, SampleRows
from aioserve.ops.batch import BATCH_FIELDS, SAMPLE_FIELDS, ArrayField
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.logprobs import LogprobRows

__all__ = ["packed", "unpacked"]

ALIGNMENT = 8
_INT64 = np.dtype(np.int64)

FIELDS: Mapping[str, tuple[ArrayField, ...]] = {
    "": (
        ArrayField("copies", np.dtype(np.int32), ("C", "copy")),
        ArrayField("pooled", _INT64, ("U",)),
    ),
    "batch": BATCH_FIELDS,
    "samples": SAMPLE_FIELDS,
    "logprobs": (
        ArrayField("sampled", _INT64, ("L",)),
        ArrayField("tops", _INT64, ("K",)),
        ArrayField("target_ids", _INT64, ("V",)),
    ),
}
"""Fields of each part of `StepArrays`; the part "" is the step itself."""

_EVERY = tuple([field for fields in FIELDS.values() for field in fields])
_SIZES = tuple(dict.fromkeys([name for field in _EVERY for name in field.sizes]))
"""Names of sizes, in the order of the numbers."""

_PARTS = ("batch", "logprobs")
"""Optional parts of a step, in the order of the numbers."""
_NUM_NUMBERS = 1 + len(_PARTS) + len(_SIZES)

Arrays = dict[str, dict[str, npt.NDArray[Any]]]
Place = tuple[str, ArrayField, tuple[int, ...], int]
"""A part, one of its fields, the field's shape, and its first byte."""


def packed(step: StepArrays) -> bytearray:
    """Pack a step. Raises `InvariantError` for edits and for draft tokens to verify."""
    arrays = _arrays_of(step)
    sizes = dict.fromkeys(_SIZES, 0)
    for part, of_part in arrays.items():
        for field in FIELDS[part]:
            *lengths, last = of_part[field.name].shape
            sizes.update(zip(field.sizes, (*lengths, last - field.more), strict=True))
    numbers = np.array([step.step, *[part in arrays for part in _PARTS], *sizes.values()], np.int64)
    places = list(_places(sizes, arrays))
    data = bytearray(_end(places))
    np.frombuffer(data, np.int64, len(numbers))[:] = numbers
    for part, field, shape, start in places:
        _view(data, field, shape, start)[...] = arrays[part][field.name]
    return data


def unpacked(data: bytearray | memoryview) -> StepArrays:
    """Unpack a step, whose arrays are views of the bytes.

    The bytes must be writable, as torch requires, and must not change until the step has ended.
    Raises ValueError if their length doesn't match their numbers.
    """
    step, *numbers = np.frombuffer(data, np.int64, _NUM_NUMBERS).tolist()
    parts = ["", "samples", *[part for part, there in zip(_PARTS, numbers, strict=False) if there]]
    sizes = dict(zip(_SIZES, numbers[len(_PARTS) :], strict=True))
    places = list(_places(sizes, parts))
    if len(data) != _end(places):
        raise ValueError(f"a step of {_end(places)} bytes has {len(data)}")
    arrays: Arrays = {part: {} for part in parts}
    for part, field, shape, start in places:
        arrays[part][field.name] = _view(data, field, shape, start)
    samples = SampleRows.of(arrays["samples"])
    extras = None
    if (told := arrays.get("logprobs")) is not None:
        rows = told["sampled"].tolist(), told["tops"].tolist()
        target_ids = told["target_ids"]
        logprobs = LogprobRows(*rows, first_scored=len(samples), target_ids=target_ids)
        extras = RowExtras(None, logprobs)
    own, batch = arrays[""], arrays.get("batch")
    return StepArrays(
        step,
        own["copies"],
        None if batch is None else HostBatch(**batch),
        samples,
        extras,
        tuple(own["pooled"].tolist()),
    )


def _arrays_of(step: StepArrays) -> Arrays:
    """Collect the arrays of each part that a step has."""
    extras = step.extras
    if extras is not None and extras.edits is not None:
        raise InvariantError(f"step {step.step} has rows with edits, which no bytes hold")
    if step.verified is not None:
        raise InvariantError(f"step {step.step} has draft tokens to verify, which no bytes hold")
    logprobs = None if extras is None else extras.logprobs
    parts = {"": step, "batch": step.batch, "logprobs": logprobs}
    arrays = {
        part: {
            field.name: np.asarray(getattr(of, field.name), field.dtype) for field in FIELDS[part]
        }
        for part, of in parts.items()
        if of is not None
    }
    return {**arrays, "samples": step.samples.arrays()}


def _places(sizes: Mapping[str, int], parts: Collection[str]) -> Iterator[Place]:
    start = 8 * _NUM_NUMBERS
    for part in [part for part in FIELDS if part in parts]:
        for field in FIELDS[part]:
            *lengths, last = [sizes[name] for name in field.sizes]
            shape = (*lengths, last + field.more)
            yield part, field, shape, start
            start += -(-math.prod(shape) * field.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _end(places: Sequence[Place]) -> int:
    _, field, shape, start = places[-1]
    return start + -(-math.prod(shape) * field.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _view(
    data: bytearray | memoryview, field: ArrayField, shape: tuple[int, ...], start: int
) -> npt.NDArray[Any]:
    return np.frombuffer(data, field.dtype, math.prod(shape), start).reshape(shape)
