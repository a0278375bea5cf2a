"""The drafters that need no model keep the contract of drafters, with small memories too."""

from __future__ import annotations

import pytest

from aioserve.plugins import PluginRegistry
from aioserve.testing import check_drafter
from tests.tiers import examples


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram",
        "ngram:min_ngram=1,max_ngram=1",
        "suffix",
        "suffix:cache_tokens=0",
        "suffix:cache_tokens=64,max_depth=4,min_probability=0",
    ],
)
def test_bundled_drafters_keep_the_contract(drafter: str) -> None:
    registry = PluginRegistry()
    check_drafter(lambda: registry.drafter(drafter), max_examples=examples(60))
