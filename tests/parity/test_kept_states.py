"""Hidden states that a decoder keeps, against transformers: inputs of layers, and last outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioserve.models.loader import load_model
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import VOCAB_SIZE

IDS = [(37 * i + 5) % VOCAB_SIZE for i in range(21)]


def expected_states(model: Any, ids: list[int], kept: tuple[int, ...]) -> torch.Tensor:
    """Return the inputs of layers of transformers' model, and the output of its last one."""
    found: dict[int, torch.Tensor] = {}
    body = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    hooks: list[Any] = []
    for index, layer in enumerate(body):

        def enters(_: Any, given: Any, options: Any, index: int = index) -> None:
            found[index] = (given[0] if given else options["hidden_states"])[0].clone()

        def leaves(_: Any, given: Any, made: Any, index: int = index) -> None:
            found[index + 1] = (made[0] if isinstance(made, tuple) else made).clone().view(-1, 48)

        hooks.append(layer.register_forward_pre_hook(enters, with_kwargs=True))
        hooks.append(layer.register_forward_hook(leaves))
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[index] for index in kept], dim=1)


@pytest.mark.parametrize("use_program", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere2", "gpt2", "mixtral"])
def test_kept_states_are_those_of_transformers(name, use_program, directory_of, oracle):
    kept = (2, 0, 3, 3, 1)
    model = load_model(
        directory_of(name), dtype="float32", use_program=use_program, kept_layers=kept
    )
    run, states, logits = PagedRun(model), [], []
    for chunk in (IDS[:9], IDS[9:10], IDS[10:]):
        logits.append(run.step({"a": chunk})["a"])
        states.append(model.kept_states.clone())
    expected = expected_states(oracle(name), IDS, kept)
    torch.testing.assert_close(torch.cat(states), expected, rtol=1e-4, atol=1e-4)
    plain = PagedRun(load_model(directory_of(name), dtype="float32", use_program=use_program))
    assert torch.equal(plain.step({"a": IDS})["a"], torch.cat(logits))


def test_what_is_not_kept_is_not_there(directory_of):
    with pytest.raises(ValueError, match="kept_layers must name a layer"):
        _ = load_model(directory_of("llama")).kept_states
