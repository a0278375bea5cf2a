"""The bar of a batch is drawn at once, moves by tokens, and is updated seldom, by the loop's
clock."""

from __future__ import annotations

import asyncio
import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from aioserve import Engine, InvalidPromptError, SamplingParams
from aioserve.engine import batches
from aioserve.progress_bar import OnTokens, token_bar_on_terminal
from aioserve.testing import FakeModel, run_simulated

STEP_SECONDS = 0.03
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


class Drawn(NamedTuple):
    at: float
    done: int
    share: float
    tokens: int
    seconds: float


class Bar:
    """A bar on a terminal that keeps its updates."""

    def __init__(self) -> None:
        self.drawn: list[Drawn] = []
        self.total = 0
        self.opened = 0

    @contextmanager
    def opens(self, name: str, total: int) -> Iterator[OnTokens]:
        self.total = total
        self.opened += 1

        def tell(done: int, share: float, tokens: int, seconds: float) -> None:
            at = asyncio.get_running_loop().time()
            self.drawn.append(Drawn(at, done, share, tokens, seconds))

        yield tell
        self.opened -= 1


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Bar:
    made = Bar()
    monkeypatch.setattr(batches, "token_bar_on_terminal", made.opens)
    return made


def model() -> FakeModel:
    return FakeModel(step_seconds=lambda plan: STEP_SECONDS, num_pages=512)


@pytest.mark.parametrize("seed", range(4))
def test_the_bar_moves_by_tokens_and_seldom(bar: Bar, seed: int) -> None:
    async def main() -> int:
        async with Engine(model(), max_num_seqs=8, max_waiting=16) as engine:
            found = await engine.generate([[index] for index in range(40)], PARAMS)
        return sum([len(one.token_ids) for one in found])

    total = run_simulated(main, seed=seed)
    assert (bar.total, bar.opened) == (40, 0)
    drawn = bar.drawn
    # Updates are a tenth of a second apart, plus at most a step that was running.
    gaps = [after.at - before.at for before, after in itertools.pairwise(drawn)]
    assert min(gaps[:-1]) > batches.LOOK_SECONDS - 1e-9
    assert max(gaps) < batches.LOOK_SECONDS + 2 * STEP_SECONDS
    assert any(one.tokens and not one.done for one in drawn)
    for before, after in itertools.pairwise(drawn):
        assert before.tokens <= after.tokens
        assert before.share <= after.share + 1e-9
        assert after.done <= after.share + 1e-9
        assert after.share <= after.tokens / 20 + 1e-9
    end = drawn[-1]
    assert (end.done, end.share, end.tokens) == (40, 40, total)
    assert end.seconds == pytest.approx(end.at - drawn[0].at + drawn[0].seconds)


def test_many_prompts_are_looked_at_as_often_as_few(bar: Bar) -> None:
    async def main() -> float:
        async with Engine(model(), max_num_seqs=64, max_waiting=4096) as engine:
            began = asyncio.get_running_loop().time()
            await engine.generate(
                [[index % 9] for index in range(600)], SamplingParams(max_tokens=1)
            )
            return asyncio.get_running_loop().time() - began

    seconds = run_simulated(main)
    assert len(bar.drawn) <= seconds / batches.LOOK_SECONDS + 2
    assert bar.drawn[-1].done == 600


def test_lengths_that_nobody_knows_move_no_bar_but_its_count(bar: Bar) -> None:
    async def main() -> None:
        async with Engine(model(), max_model_len=40) as engine:
            await engine.generate([[1], [2]], SamplingParams(ignore_eos=True))

    run_simulated(main)
    assert any(one.tokens and one.share == 0 for one in bar.drawn)
    assert bar.drawn[-1].share == 2


def test_a_bar_ends_with_what_fails(bar: Bar) -> None:
    async def main() -> int:
        async with Engine(model()) as engine:
            with pytest.raises(InvalidPromptError):
                await engine.generate([[1], [-1]], PARAMS)
            told = len(bar.drawn)
            await asyncio.sleep(5)
            return len(bar.drawn) - told

    assert run_simulated(main) == 0


def test_one_who_wants_no_bar_has_none(bar: Bar) -> None:
    async def main() -> None:
        async with Engine(model()) as engine:
            await engine.generate([[1], [2]], PARAMS, progress=False)
            await engine.generate([[1], [2]], PARAMS, progress=lambda done, total: None)

    run_simulated(main)
    assert not bar.drawn


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_none_of_them_at_once_and_tokens_per_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with token_bar_on_terminal("completions", 200) as bar:
        assert "completions" in screen.getvalue()
        assert "0/200" in screen.getvalue()
        assert bar is not None
        bar(3, 4.5, 1500, 2.0)
    assert "3/200 · 1,500 tokens · 750 tokens/s" in screen.getvalue()


def test_what_is_no_terminal_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with token_bar_on_terminal("completions", 200) as bar:
        assert bar is None
    assert capsys.readouterr().err == ""
