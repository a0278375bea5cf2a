"""`aioserve chat` as a person uses it: under a terminal, with the terminal's own Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.terminal import CTRL_C, CTRL_D, Terminal

# Close to uniform noise, so that the answer hardly ever ends by itself.
ENDLESS = ("--temperature", "100", "--seed", "1")
COUNTS = r"\[\d+ prompt tokens?(?: \(\d+ cached\))? · \d+ output tokens? .*\]"


def prompt_tokens(counts: str) -> int:
    return int(re.findall(r"\d+", counts)[0])


@pytest.mark.more
def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    with Terminal("chat", *ENDLESS) as chat:
        chat.expect("> ")
        chat.send("What does os.listdir do?\n")
        chat.expect(r"do\?\s+\S")
        chat.send(CTRL_C)
        chat.expect(r"\[stopped\]\s+> ")
        chat.send("/help\n")
        chat.expect(r"/exit.*\s+> ")  # a Ctrl-D before the prompt is shown would be lost
        chat.send(CTRL_D)
        assert chat.exit_code() == 0
        assert "Traceback" not in chat.seen


@pytest.mark.more
def test_turns_are_remembered_until_reset(forking: Forks) -> None:
    words = ("chat", "--max-tokens", "8", "--temperature", "0")
    with Terminal(*words, forks=forking) as chat:
        counts = []
        for line in ("What does json.loads do?", "And dumps?"):
            chat.expect("> ")
            chat.send(line + "\n")
            counts.append(prompt_tokens(chat.expect(COUNTS)))
        assert counts[1] > counts[0]
        chat.expect("> ")
        chat.send("/reset\n")
        chat.expect("forgotten")
        chat.expect("> ")
        chat.send("What does json.loads do?\n")
        assert prompt_tokens(chat.expect(COUNTS)) == counts[0]
        chat.expect("> ")
        chat.send("/nonsense\n")
        chat.expect("unknown command /nonsense")
        chat.expect("> ")
        chat.send("/exit\n")
        assert chat.exit_code() == 0


def test_ctrl_c_at_the_prompt_leaves(forking: Forks) -> None:
    with Terminal("chat", forks=forking) as chat:
        chat.expect("> ")
        chat.send("half a line" + CTRL_C)
        assert chat.exit_code() == 0
        assert "Traceback" not in chat.seen


def test_questions_may_come_through_a_pipe(aioserve: Run) -> None:
    questions = "What does json.loads do?\nWhat does json.dumps do?"
    done = aioserve("chat", "--max-tokens", 6, stdin=questions)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(COUNTS, done.stderr)) == 2


def test_a_model_without_a_chat_template_is_refused(aioserve_here: Run, tiny_model: Path) -> None:
    done = aioserve_here("chat", tiny_model)
    assert done.returncode == 2
    assert "chat template" in done.stderr
