"""Routers against those of transformers, and their choice among equal scores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aioserve.errors import UnsupportedModelError
from aioserve.formats.routing import Routing
from aioserve.ops import Backend, backend_named
from aioserve.ops.experts import Mixture

SIZES = [(8, 1), (8, 2), (60, 4), (64, 8), (96, 16), (128, 8), (256, 8), (256, 16)]
"""Pairs of the number of experts, and the number that each row has."""
TOLERANCE = 1e-5


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_named(request.param)


def routed(backend: Backend, routing: Routing, scores: Tensor, correction: Tensor | None = None):
    up, down = backend.linear(torch.ones(2, 1)), backend.linear(torch.ones(1, 1))
    count = routing.experts
    mixture = backend.mixture(routing, [up] * count, [down] * count, correction=correction)
    return mixture.route(scores)


def scores_of(rows: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, experts, generator=generator) * 3


class Router(NamedTuple):
    """Router of transformers, and our settings for it."""

    module: str
    name: str
    settings: dict[str, Any]
    ours: dict[str, Any]


def softmax(module: str, name: str, **settings: Any) -> Router:
    normalized = settings.get("norm_topk_prob", True)
    return Router(module, name, settings, {"normalized": normalized})


def sigmoid(groups: int, top_groups: int, normalized: bool, scale: float) -> Router:
    settings = {
        "n_group": groups,
        "topk_group": top_groups,
        "norm_topk_prob": normalized,
        "routed_scaling_factor": scale,
    }
    ours = {
        "sigmoid": True,
        "groups": groups,
        "top_groups": top_groups,
        "group_best": 2,
        "normalized": normalized,
        "scale": scale,
    }
    return Router("deepseek_v3", "DeepseekV3TopkRouter", settings, ours)


def limited(method: str, groups: int, top_groups: int) -> Router:
    settings = {
        "topk_method": method,
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": 16.0,
    }
    ours = {"scale": 16.0}
    if method != "greedy":
        ours |= {"groups": groups, "top_groups": top_groups}
    return Router("deepseek_v2", "DeepseekV2TopkRouter", settings, ours)


ROUTERS = {
    "mixtral": softmax("mixtral", "MixtralTopKRouter"),
    "qwen2_moe": softmax("qwen2_moe", "Qwen2MoeTopKRouter", norm_topk_prob=False),
    "qwen2_moe, normalised": softmax("qwen2_moe", "Qwen2MoeTopKRouter", norm_topk_prob=True),
    "qwen3_moe": softmax("qwen3_moe", "Qwen3MoeTopKRouter", norm_topk_prob=False),
    "qwen3_moe, normalised": softmax("qwen3_moe", "Qwen3MoeTopKRouter", norm_topk_prob=True),
    "olmoe": softmax("olmoe", "OlmoeTopKRouter", norm_topk_prob=False),
    "olmoe, normalised": softmax("olmoe", "OlmoeTopKRouter", norm_topk_prob=True),
    "gpt_oss": softmax("gpt_oss", "GptOssTopKRouter"),
    "deepseek_v2": limited("greedy", 1, 1),
    "deepseek_v2, groups": limited("group_limited_greedy", 4, 3),
    "deepseek_v3": sigmoid(4, 3, True, 2.5),
    "deepseek_v3, as they are": sigmoid(4, 3, False, 1.0),
    "deepseek_v3, one group": sigmoid(1, 1, True, 2.5),
}


def theirs(
    router: Router, experts: int, top_k: int, correction: Tensor | None
) -> Callable[..., Any]:
    """Make transformers' router with logits that are its input."""
    from importlib import import_module

    module = import_module(f"transformers.models.{router.module}.modeling_{router.module}")
    settings = {
        "num_experts_per_tok": top_k,
        "num_experts": experts,
        "num_local_experts": experts,
        "hidden_size": experts,
        **router.settings,
    }
    made = getattr(module, router.name)(SimpleNamespace(**settings))
    with torch.no_grad():
        made.weight.copy_(torch.eye(experts))
        if correction is not None:
            made.e_score_correction_bias.copy_(correction)
    return made


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_and_weighs_as_transformers_has_it(
    name: str, experts: int, top_k: int, backend: Backend
) -> None:
    router = ROUTERS[name]
    correction = None
    if name.startswith("deepseek_v3"):
        # Scores that choose are then far below -1, and differ from the weights.
        correction = torch.randn(experts, generator=torch.Generator().manual_seed(1)) - 4
    groups, top_groups = router.ours.get("groups", 1), router.ours.get("top_groups", 1)
    top_k = min(top_k, experts // groups * top_groups)
    scores = scores_of(33, experts)

    with torch.inference_mode():
        _, weights, ids = theirs(router, experts, top_k, correction)(scores)
    found = routed(
        backend, Routing(experts=experts, top_k=top_k, **router.ours), scores, correction
    )

    expected = torch.zeros(33, experts).scatter_(1, ids, weights.float())
    actual = torch.zeros(33, experts).scatter_(1, found.ids.long(), found.weights)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert (found.ids.sort(-1).values == ids.sort(-1).values).all()


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_of_equal_scores_the_lowest_expert_comes_first(
    sigmoid: bool, normalized: bool, backend: Backend
) -> None:
    routing = Routing(experts=5, top_k=4, sigmoid=sigmoid, normalized=normalized)
    scores = torch.tensor([[0.0] * 5, [1.0, 2.0, 1.0, 2.0, 1.0], [-80.0, -90.0, -90.0, 0.0, -90.0]])

    ids = routed(backend, routing, scores).ids

    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 0, 2], [3, 0, 1, 2]]


def test_scores_that_a_softmax_makes_equal_are_told_apart(backend: Backend) -> None:
    scores = torch.tensor([[-200.0, -150.0, 0.0, -199.0]])
    assert routed(backend, Routing(experts=4, top_k=3), scores).ids.tolist() == [[2, 1, 3]]


def test_equal_groups_are_chosen_from_the_lowest_on(backend: Backend) -> None:
    routing = Routing(experts=6, top_k=2, groups=3, top_groups=1)
    scores = torch.tensor([[1.0, 0.0, 1.0, 0.5, 1.0, 0.9]])
    assert routed(backend, routing, scores).ids.tolist() == [[0, 1]]


def test_a_correction_chooses_and_doesn_t_weigh(backend: Backend) -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0]])
    correction = torch.tensor([-9.0, -3.0, -2.5])
    routing = Routing(experts=3, top_k=2, sigmoid=True)

    found = routed(backend, routing, scores, correction)

    assert found.ids.tolist() == [[2, 1]]
    torch.testing.assert_close(found.weights, scores[:, [2, 1]].sigmoid())


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("group_best", [1, 2])
def test_a_row_with_nan_has_nan_weights_of_experts_that_exist(
    sigmoid: bool, group_best: int, backend: Backend
) -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor(
        [[nan, 1, 2, 3], [nan] * 4, [inf, 1, 2, 3], [1, 2, 3, nan], [-inf] * 4, [1, 2, 3, 4]]
    )
    routing = Routing(
        experts=4, top_k=2, sigmoid=sigmoid, groups=2, top_groups=1, group_best=group_best
    )
    found = routed(backend, routing, scores)

    assert 0 <= int(found.ids.min()) <= int(found.ids.max()) < 4
    assert found.weights[:4].isnan().all()
    assert found.weights[5].isfinite().all()
    assert all(len(set(row)) == 2 for row in found.ids.tolist())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_another_order_of_the_experts_changes_no_bit(normalized: bool, sigmoid: bool) -> None:
    scores = scores_of(64, 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    routing = Routing(experts=60, top_k=4, sigmoid=sigmoid, normalized=normalized)
    native = backend_named("native")

    plain, moved = routed(native, routing, scores), routed(native, routing, scores[:, order])

    assert torch.equal(order[moved.ids.long()], plain.ids.long())
    assert torch.equal(moved.weights, plain.weights)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_k": 0}, "top_k must be from 1 to the 12 experts"),
        ({"top_k": 13}, "top_k must be from 1 to the 12 experts"),
        ({"groups": 5}, "12 experts must be in groups of the same size"),
        ({"groups": 3, "top_groups": 4}, "got 3 groups and top_groups=4"),
        ({"groups": 3, "top_groups": 1, "top_k": 5}, "top_k must be from 1 to the 4 experts"),
        ({"groups": 6, "top_groups": 3, "group_best": 3}, "group_best from 1 to 2"),
    ],
)
def test_routing_that_can_t_be_is_refused(changes: dict[str, int], named: str) -> None:
    settings: dict[str, Any] = {"experts": 12, "top_k": 2, **changes}
    with pytest.raises(UnsupportedModelError, match=named):
        Routing(**settings)


def test_scores_of_another_shape_or_dtype_are_refused(backend: Backend) -> None:
    routing = Routing(experts=4, top_k=2)
    with pytest.raises(ValueError, match="scores"):
        routed(backend, routing, torch.zeros(3, 5))
    with pytest.raises(TypeError, match="scores"):
        routed(backend, routing, torch.zeros(3, 4, dtype=torch.bfloat16))


def test_a_mixture_of_another_number_of_experts_is_refused(backend: Backend) -> None:
    up, down = backend.linear(torch.ones(2, 1)), backend.linear(torch.ones(1, 1))
    with pytest.raises(ValueError, match="ups and downs must be 3 each, got 2 and 3"):
        Mixture(Routing(experts=3, top_k=1), [up] * 2, [down] * 3)
