"""Prompts by a fake FlashInfer without a GPU, which computes from the arrays of its plans."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.ops.gpu.attention_tiles import AttentionTiles, Tile
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.flashinfer_attention import FlashInferAttention, why_not
from tests.ops.gpu import fake_flashinfer
from tests.ops.gpu.prepared import Prepared, assert_close
from tests.ops.scenarios import Heads, Scenario, lay_out
from tests.tiers import examples

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the fake computes on the CPU; tests/gpu has the real one"
)

SMALL = AttentionTiles(prefill=Tile(32, 16, 4, 1), decode=Tile(16, 16, 4, 1), part_keys=32)
CPU = torch.device("cpu")
HEADS = Heads(4, 2, 64)
DECODES = [(1, 1, 7), (3, 1, 17)]
CHUNKS = [(2, 11, 11), (4, 9, 23), (6, 1, 18)]

sequences = st.integers(1, 30).flatmap(
    lambda context: st.tuples(st.integers(1, 9), st.integers(1, context), st.just(context))
)


def prepared(scenario: Scenario) -> Prepared:
    return Prepared(scenario, CPU, SMALL)


@settings(max_examples=examples(12))
@given(
    batches=st.lists(st.lists(sequences, min_size=1, max_size=3), min_size=1, max_size=4),
    heads=st.sampled_from([Heads(2, 2, 64), Heads(3, 1, 64), Heads(4, 2, 128)]),
    page_size=st.sampled_from([1, 2, 4, 16, 32]),
    window=st.sampled_from([0, 1, 2, 16, 17]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_any_batches_agree_with_triton(
    batches: list[list[tuple[int, int, int]]],
    heads: Heads,
    page_size: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> None:
    attention = FlashInferAttention(fake_flashinfer, CPU)
    how: dict[str, Any] = {"scale": 0.1, "window": window, "soft_cap": soft_cap}
    for batch in batches:
        ordered = sorted(batch, key=lambda sequence: sequence[1])
        step = prepared(lay_out(ordered, heads, page_size=page_size, dtype=dtype))
        assert_close(step.rows(attention, **how), step.rows(**how))


def test_decodes_stay_triton_s_to_the_last_bit() -> None:
    step = prepared(lay_out([*DECODES, *CHUNKS], HEADS, dtype=torch.bfloat16))
    attention = FlashInferAttention(fake_flashinfer, CPU)
    assert torch.equal(step.rows(attention)[:2], step.rows()[:2])
    module, made = counting()
    alone = prepared(lay_out(DECODES, HEADS, dtype=torch.bfloat16))
    assert torch.equal(alone.rows(FlashInferAttention(module, CPU)), step.rows()[:2])
    assert not made


class Counting(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    made: list[Counting]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)


def counting() -> tuple[Any, list[Counting]]:
    made: list[Counting] = []
    kind = type("Wrapper", (Counting,), {"made": made})
    return type("Module", (), {"BatchPrefillWithPagedKVCacheWrapper": kind}), made


def test_a_batch_is_planned_once_for_layers_that_are_alike() -> None:
    module, made = counting()
    attention = FlashInferAttention(module, CPU)
    kinds: list[dict[str, Any]] = [{}, {"window": 5}, {"soft_cap": 3.0}, {"scale": 0.3}]
    for round_number in range(1, 4):
        step = prepared(lay_out([*DECODES, *CHUNKS], HEADS, dtype=torch.float16))
        for _ in range(3):
            for kind in kinds:
                assert_close(step.rows(attention, **kind), step.rows(**kind))
        # Wrappers are made in the first two rounds, one for each kind.
        assert len(made) == 4 * min(round_number, 2)
        assert sum(wrapper.plans for wrapper in made) == 4 * round_number


def test_what_a_plan_is_made_of_stays_until_it_is_on_the_device() -> None:
    """The next step is planned while copies of the one before may still be pending."""
    told: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            told.append(f"record {self.name}")

        def synchronize(self) -> None:
            told.append(f"wait {self.name}")

    names = iter("ab")
    module, made = counting()
    attention = FlashInferAttention(module, CPU, new_event=lambda device: Event(next(names)))
    steps = [
        prepared(lay_out(chunks, HEADS, page_size=4, dtype=torch.float16))
        for chunks in (CHUNKS, [(5, 3, 30), (7, 2, 9)], [(8, 20, 28)])
    ]
    for index, step in enumerate(steps):
        step.rows(attention)
        for before in steps[max(index - 1, 0) : index]:
            # The real one may finish copying for the step before only now.
            wrapper = made[index - 1]
            out = torch.empty_like(before.qkv[:, : 4 * 64]).unflatten(1, (4, 64))
            queries = before.qkv[:, : 4 * 64].unflatten(1, (4, 64))
            wrapper.run(queries, before.kv.layer(0), out=out)
            assert_close(out.flatten(1), before.rows())
    first, second = told[0].removeprefix("wait "), told[2].removeprefix("wait ")
    assert {first, second} == {"a", "b"}
    assert told == [
        f"{verb} {name}" for name in (first, second, first) for verb in ("wait", "record")
    ]


def test_copies_that_were_enqueued_before_a_plan_failed_are_waited_for() -> None:
    told: list[str] = []

    class Event:
        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

    class Failing(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        fails = True

        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options)
            if self.fails:
                raise MemoryError("planned for the test")

    module = type("Module", (), {"BatchPrefillWithPagedKVCacheWrapper": Failing})
    attention = FlashInferAttention(module, CPU, new_event=lambda device: Event())
    step = prepared(lay_out(CHUNKS, HEADS, dtype=torch.float16))
    with pytest.raises(MemoryError):
        step.rows(attention)
    assert told == ["wait", "record"]
    Failing.fails = False
    assert_close(step.rows(attention), step.rows())


def test_a_batch_without_prompt_tokens_gives_no_rows() -> None:
    step = prepared(lay_out([(1, 0, 5)], HEADS, dtype=torch.float16))
    assert step.rows(FlashInferAttention(fake_flashinfer, CPU)).shape == (0, 256)


def test_the_backend_attends_with_what_it_is_given() -> None:
    module, made = counting()
    backend = CudaBackend(CPU)
    backend.prompt_attention = FlashInferAttention(module, CPU)
    step = prepared(lay_out([*DECODES, *CHUNKS], HEADS, dtype=torch.float16))
    got = backend.paged_attention(step.qkv, KVLayer(step.batch, step.kv, 0), AttentionKind(0.125))
    assert_close(got, step.rows())
    assert [wrapper.plans for wrapper in made] == [1]


FITS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "query_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "max_tokens": 2048,
    "max_sequences": 256,
}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 64, "kv_heads": 32}, None),
        ({"head_dim": 256, "max_tokens": 65_536}, None),
        ({"dtype": torch.float32}, "it computes in float16 and bfloat16, .* in float32"),
        ({"head_dim": 96}, "heads of 64, 128, 256 dimensions, and the model's have 96"),
        (
            {"max_tokens": 1 << 20, "query_heads": 64},
            "1048576 tokens of 256 sequences may take .* 8388608",
        ),
    ],
)
def test_what_it_does_not_take_is_named(given: dict[str, Any], reason: str | None) -> None:
    found = why_not(**(FITS | given))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_the_fake_has_the_signatures_of_the_real_one() -> None:
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("FlashInfer isn't installed")
    source = (Path(found.origin).parent / "prefill.py").read_text(encoding="utf-8")
    (wrapper,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "BatchPrefillWithPagedKVCacheWrapper"
    )
    for name in ("__init__", "plan", "run"):
        # Overloads come before the real function.
        real = [
            node for node in wrapper.body if isinstance(node, ast.FunctionDef) and node.name == name
        ][-1]
        fake = inspect.signature(getattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, name))
        assert list(fake.parameters) == _parameters(real.args), name
        defaults = [
            repr(parameter.default)
            for parameter in fake.parameters.values()
            if parameter.default is not parameter.empty
        ]
        given = [*real.args.defaults, *(value for value in real.args.kw_defaults if value)]
        assert defaults == [repr(ast.literal_eval(value)) for value in given], name


def _parameters(arguments: ast.arguments) -> list[str]:
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        names.append(arguments.vararg.arg)
    return names + [one.arg for one in arguments.kwonlyargs]
