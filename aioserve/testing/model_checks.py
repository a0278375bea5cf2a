"""Checks that families of models keep their contract, on a model with random weights."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aioserve.engine.engine import Engine
from aioserve.errors import AioserveError
from aioserve.isolation import shown
from aioserve.models.architecture import Architecture
from aioserve.models.families.family import ModelFamily, check_family
from aioserve.models.fields import Fields
from aioserve.models.known import BUNDLED_KINDS
from aioserve.plugins import ModelFamilySpec, hookimpl
from aioserve.request import SamplingParams

__all__ = ["check_model_family"]

NAME = "CheckedForCausalLM"
"""Name of the family in the files of the check."""
PROMPTS: Sequence[Sequence[int]] = ([7], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89], [9] * 40)
MAX_TOKENS = 12
SMALL_STEP_TOKENS = 8


class _Offering:
    """Plugin that offers the family."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family

    @hookimpl
    def aioserve_model_families(self) -> list[ModelFamilySpec]:
        return [ModelFamilySpec(NAME, self._family)]


def check_model_family(family: ModelFamily, *, seed: int = 0) -> None:
    """Raise `AssertionError` unless a family of models

    - has fields that can be used, and an `example`;
    - describes its example by an `Architecture`, and again by one that is equal;
    - leaves the fields as they are;
    - makes a model that loads: random weights of its tensors, float32, drawn by `seed`;
    - has the same greedy tokens from the native and the reference backend, and with prompts that
      are computed in pieces.

    Needs torch, and takes some seconds.
    """
    try:
        check_family(family)
        if not family.example:
            raise ValueError("must have an example, a small config.json, to be checked")
    except ValueError as error:
        raise AssertionError(f"the family {error}") from error
    _check_description(family)
    try:
        found = asyncio.run(_tokens_by_engine(family, seed))
    except AioserveError as error:
        raise AssertionError(f"a model of the example can't be served: {error}") from error
    first, *others = found.items()
    for engine, tokens in others:
        if tokens != first[1]:
            raise AssertionError(f"{engine} draws {tokens}, and {first[0]} draws {first[1]}")


def _check_description(family: ModelFamily) -> None:
    before = json.dumps(family.example, sort_keys=True)
    described: list[Architecture] = []
    for _ in range(2):
        try:
            found = family.describe(Fields(json.loads(before), "the example"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise AssertionError(f"describe raised {shown(error)} for the example") from error
        if not isinstance(found, Architecture):
            raise AssertionError(f"describe must give an Architecture, got {shown(found)}")
        described.append(found)
    if described[0] != described[1]:
        raise AssertionError("describe gives two architectures for one config.json")
    values = json.loads(before)
    family.describe(Fields(values, "the example"))
    if json.dumps(values, sort_keys=True) != before:
        raise AssertionError("describe must leave the fields as they are")


async def _tokens_by_engine(family: ModelFamily, seed: int) -> dict[str, list[list[int]]]:
    from aioserve.testing.random_model import write_random_model

    known = msgspec.structs.replace(
        BUNDLED_KINDS, families={**BUNDLED_KINDS.families, NAME: family}
    )
    config = {**family.example, "architectures": [NAME], "model_type": family.model_type}
    found: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_random_model(
            Path(directory) / "model", config, seed=seed, dtype="float32", known=known
        )
        for backend in ("native", "reference"):
            for step_tokens in (512, SMALL_STEP_TOKENS):
                engine = Engine(
                    str(path),
                    device="cpu",
                    backend=backend,
                    max_num_seqs=len(PROMPTS),
                    max_num_batched_tokens=step_tokens,
                    plugins=[_Offering(family)],
                )
                params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
                async with engine:
                    answers = await asyncio.gather(
                        *[engine.generate(prompt, params) for prompt in PROMPTS]
                    )
                what = f"backend {backend} with {step_tokens} tokens in a step"
                found[what] = [list(answer.token_ids) for answer in answers]
    return found
