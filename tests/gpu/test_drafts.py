"""Draft models and heads on a GPU change no token, and a perfect draft is always right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, Speculation
from tests.engine.test_draft_heads import write_drafts
from tests.execution.gpu.host_device import cuda_is_the_host
from tests.gpu.answers import OPTIONS, answers, reference, requests
from tests.gpu.place import Place

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_drafts(path)
    return path


@pytest.mark.parametrize("pages", [{}, {"num_pages": 40, "num_host_pages": 80}])
@pytest.mark.parametrize("drafter", ["model:target", "model:small", "eagle3", "mtp", "medusa"])
def test_what_drafts_changes_no_token(
    place: Place,
    models: Path,
    drafter: str,
    pages: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Float32, graphs, prefix hits, and few pages, so that requests are preempted."""
    if not place.is_card:
        cuda_is_the_host(monkeypatch)
    kind, _, directory = drafter.partition(":")
    path = models / (directory or kind)
    speculation = Speculation(drafter=f"{kind}:path={path}", max_tokens=4)
    asked = requests(place.size(8, 2), place.size(24, 5))
    target = models / "target"

    async def main() -> None:
        expected = await reference(target, asked)
        options: dict[str, Any] = OPTIONS | pages | {"device": "cuda", "dtype": "float32"}
        options |= {} if place.is_card else {"capture_graphs": False}
        async with Engine(str(target), speculation=speculation, **options) as engine:
            assert await answers(engine, asked) == expected
            stats = engine.stats()
        assert stats.drafter_faults_total == 0
        assert sum(stats.tokens_drafted_total) > 0
        if drafter == "model:target":
            assert stats.tokens_accepted_total == stats.tokens_drafted_total

    asyncio.run(main())
