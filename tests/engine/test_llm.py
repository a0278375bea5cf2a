"""An engine for callers without an event loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aioserve import (
    LLM,
    EngineClosedError,
    InvalidPromptError,
    InvalidRequestError,
    ModelNotFoundError,
    SamplingParams,
    UnknownPolicyError,
)
from aioserve.testing import FakeModel, expected_tokens

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=3)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aioserve-llm"]


def test_prompts_are_answered_in_their_order() -> None:
    prompts = [[index, 2, 3] for index in range(40)]
    told: list[tuple[int, int]] = []
    with LLM(FakeModel(), max_num_seqs=4, max_waiting=8) as llm:
        found = llm.generate(
            prompts, PARAMS, progress=lambda *counts: told.append(counts), request_id="r"
        )
        assert [list(one.token_ids) for one in found] == [
            expected_tokens(prompt, 6, seed=3) for prompt in prompts
        ]
        assert [one.request_id for one in found] == [f"r-{index}" for index in range(40)]
        assert told == [(done, 40) for done in range(41)]
        one = llm.generate(prompts[3], PARAMS)
        assert one.token_ids == found[3].token_ids
        assert repr(llm) == f"LLM({llm.engine!r})"
    assert not threads()


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    prompts, counts = [[1], [2], [3]], [1, 4, 2]
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
    with LLM(FakeModel()) as llm:
        found = llm.generate(prompts, each, progress=False)
        assert [len(one.token_ids) for one in found] == counts
        with pytest.raises(InvalidRequestError, match="one for each of 3, got 2"):
            llm.generate(prompts, each[:2])


def test_the_first_that_fails_ends_the_others_and_later_calls_work() -> None:
    with LLM(FakeModel(step_seconds=lambda plan: 0.001), max_num_seqs=2) as llm:
        bad: Any = [[1, 2], [-5], *([[3]] * 20)]
        with pytest.raises(InvalidPromptError, match="-5"):
            llm.generate(bad, SamplingParams(max_tokens=200, ignore_eos=True))
        assert len(llm.generate([4], PARAMS).token_ids) == 6
        wrong: Any = "yes"
        with pytest.raises(InvalidRequestError, match="progress must be a function"):
            llm.generate([[1]], PARAMS, progress=wrong)
        with pytest.raises(InvalidRequestError, match="progress goes with a sequence"):
            llm.generate(wrong, PARAMS, progress=False)


def test_threads_share_the_engine() -> None:
    with LLM(FakeModel()) as llm, ThreadPoolExecutor(8) as pool:
        prompts = [[index, 9] for index in range(50)]
        found = list(pool.map(lambda prompt: llm.generate(prompt, PARAMS), prompts))
    assert [list(one.token_ids) for one in found] == [
        expected_tokens(prompt, 6, seed=3) for prompt in prompts
    ]


def test_it_works_in_a_program_whose_loop_runs() -> None:
    async def cell_of_a_notebook() -> int:
        with LLM(FakeModel()) as llm:
            return len(llm.generate([1, 2], PARAMS).token_ids)

    assert asyncio.run(cell_of_a_notebook()) == 6


def test_text_chat_and_vectors_come_from_the_embedded_model() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5)
    told: list[tuple[int, int]] = []
    with LLM(progress=lambda *counts: told.append(counts)) as llm:
        assert told[-1][0] == told[-1][1] > 0
        assert llm.generate("import os\n", params).text
        answer = llm.chat([{"role": "user", "content": "What is os?"}], params=params)
        assert answer.content
        assert llm.embed(["a", "b"]).shape[0] == 2


def test_what_is_closed_says_so() -> None:
    llm = LLM(FakeModel())
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="this LLM is closed"):
        llm.generate([1], PARAMS)
    assert not threads()


def test_what_fails_to_load_leaves_no_thread() -> None:
    with pytest.raises(UnknownPolicyError):
        LLM(FakeModel(), policy="prioritty")
    with pytest.raises(ModelNotFoundError):
        LLM("no/such/model")
    assert not threads()


def test_what_is_dropped_ends() -> None:
    llm = LLM(FakeModel())
    llm.generate([1], PARAMS)
    del llm
    gc.collect()
    assert not threads()


def test_a_call_on_its_own_thread_is_refused() -> None:
    with LLM(FakeModel()) as llm:

        def call(done: int, total: int) -> None:
            llm.generate([7], PARAMS)

        with pytest.raises(RuntimeError, match="can't be called on its own thread"):
            llm.generate([[1], [2]], PARAMS, progress=call)


PROGRAM = """
import signal, threading
from aioserve import LLM, SamplingParams
from aioserve.testing import FakeModel

llm = LLM(FakeModel(step_seconds=lambda plan: 0.01, max_model_len=4000, num_pages=400))
main = threading.main_thread().ident
threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
try:
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3900, ignore_eos=True))
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids))
print(llm.engine.config.max_num_seqs > 0)
"""


def test_an_interrupt_ends_a_call_and_the_end_of_the_program_the_rest() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split() == ["interrupted", "3", "True"], done.stderr
    assert done.returncode == 0
    assert not done.stderr
