"""Policies and drafters in files are named the same way in all commands.

A policy is simulated, swept, checked, measured and served. A drafter is checked, measured, run and
served.
"""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess

POLICY = """
import asyncio
from pathlib import Path

from aioserve import SchedulingPolicy

print("run")
asyncio.run(asyncio.sleep(0))


class Mine(SchedulingPolicy):
    def __init__(self, *, book: str = "", most: int = 1) -> None:
        self.book = book

    def order(self, waiting, view):
        print("asked")
        if self.book:
            Path(self.book).touch()
        return list(waiting)


class Broken(SchedulingPolicy):
    def __init__(self) -> None:
        raise KeyError("planted")


class Careless(SchedulingPolicy):
    made = 0

    def __init__(self) -> None:
        Careless.made += 1
        self.backwards = Careless.made % 2 == 1

    def order(self, waiting, view):
        return list(reversed(waiting)) if self.backwards else list(waiting)


NUMBER = 7
"""

LOAD = ("--num-prompts", 2, "--input-len", 12, "--output-len", 2)
DOORS = {
    "simulate": ("simulate", "--synthetic", "bursts", "--num-requests", 9, "--policy"),
    "sweep": ("sweep", "--synthetic", "bursts", "--num-requests", 9, "--jobs", 1, "--policy"),
    "throughput": ("bench", "throughput", "pyhelp", *LOAD, "--policy"),
    "latency": ("bench", "latency", "pyhelp", *LOAD, "--policy"),
    "serve": ("serve", "--port", 0, "--policy"),
}
CHECK = ("plugins", "check", "--examples", 20, "--")
DRAFTER_DOORS = {
    "throughput": ("bench", "throughput", "pyhelp", *LOAD, "--speculation"),
    "latency": ("bench", "latency", "pyhelp", *LOAD, "--speculation"),
    "run": ("run", "pyhelp", "import", "--max-tokens", 4, "--speculation"),
    "serve": ("serve", "--port", 0, "--speculation"),
}


DRAFTER = """
from aioserve import Drafter

print("run")


class Mine(Drafter):
    def __init__(self, *, most: int = 1) -> None:
        self.most, self.last = most, {}

    def start(self, slot, sequence):
        self.last[slot] = int(sequence.known_ids[-1])

    def extend(self, slot, token_ids):
        self.last[slot] = token_ids[-1]

    def draft(self, slot, limit):
        return [self.last[slot]] * min(limit, self.most)

    def end(self, slot):
        del self.last[slot]


class Broken(Mine):
    def __init__(self) -> None:
        raise KeyError("planted")


NUMBER = 7
"""


@pytest.fixture
def drafter_file(policy_file: str) -> str:
    """The `policy_file`, with drafters in place of policies."""
    Path(policy_file).write_text(DRAFTER)
    return policy_file


@pytest.fixture
def policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a file with policies in the working directory."""
    (tmp_path / "mine.py").write_text(POLICY)
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    return "mine.py"


REFUSED = [
    ("mine.py", 2, "{file} 'mine.py': name a class of the file, as 'mine.py:CLASS'"),
    ("no.py:Mine", 2, "{file} 'no.py:Mine': there is no file 'no.py'"),
    ("mine.py:Yours", 2, "{file} 'mine.py:Yours': 'Yours' isn't in the file; there are: "),
    ("mine.py:NUMBER", 2, "{file} 'mine.py:NUMBER': 'NUMBER' is no {base}"),
    ("mine.py:Mine:least=3", 2, "{word} 'Mine' has no option 'least'"),
    ("mine.py:Mine:most=x", 2, "option 'most' of {word} 'Mine' must be a whole number"),
    ("mine.py:Broken", 1, "{word} 'mine.py:Broken' can't be made: KeyError('planted')"),
    ("broken.py:Mine", 1, "{file} 'broken.py:Mine' can't be loaded: SystemExit(0)"),
]


def refused(run: Run, command: tuple[object, ...], given: str, code: int, message: str) -> None:
    done = run(*command, given)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("aioserve: ")
    assert message in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("given", "code", "message"), REFUSED)
def test_a_policy_of_a_file_is_refused_in_the_same_words_wherever_it_is_given(
    aioserve_here: Run, policy_file: str, door: str, given: str, code: int, message: str
) -> None:
    said = message.format(file="policy", word="policy", base="SchedulingPolicy")
    refused(aioserve_here, DOORS[door], given, code, said)


@pytest.mark.parametrize("door", DRAFTER_DOORS)
@pytest.mark.parametrize(("given", "code", "message"), REFUSED)
def test_a_drafter_of_a_file_is_refused_in_the_words_of_a_policy_wherever_it_is_given(
    aioserve_here: Run, drafter_file: str, door: str, given: str, code: int, message: str
) -> None:
    said = message.format(file="drafter", word="drafter", base="Drafter")
    refused(aioserve_here, DRAFTER_DOORS[door], given, code, said)


@pytest.mark.parametrize(("given", "code", "message"), REFUSED)
def test_what_is_checked_of_a_file_may_be_of_either_kind_and_is_refused_in_the_same_words(
    aioserve_here: Run, policy_file: str, given: str, code: int, message: str
) -> None:
    either = {"file": "policy or drafter", "base": "SchedulingPolicy and no Drafter"}
    refused(aioserve_here, CHECK, given, code, message.format(**either, word="policy"))


@pytest.mark.more
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_a_policy_of_a_file_is_measured_and_what_it_prints_is_no_result(
    aioserve_here: Run, policy_file: str, kind: str
) -> None:
    policy = f"{policy_file}:Mine:book=asked"
    done = aioserve_here(*DOORS[kind], policy, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["options"]["policy"] == policy
    assert Path("asked").exists()
    assert done.stderr.count("run\n") == 1
    assert "asked\n" in done.stderr


@pytest.mark.more
def test_a_policy_of_a_file_is_checked(aioserve_here: Run, policy_file: str) -> None:
    done = aioserve_here("plugins", "check", f"{policy_file}:Mine:most=2", "--examples", 20)
    assert done.returncode == 0, done.stderr
    said = f"policy {policy_file}:Mine:most=2 keeps its contract: 20 random examples\n"
    assert done.stdout == said
    assert "asked\n" in done.stderr


@pytest.mark.more
def test_a_check_runs_the_file_once_so_that_what_its_policies_share_is_seen(
    aioserve_here: Run, policy_file: str
) -> None:
    done = aioserve_here("plugins", "check", f"{policy_file}:Careless", "--examples", 100)
    assert done.returncode == 1, done.stdout
    assert f"policy {policy_file}:Careless fails: " in done.stdout
    assert done.stderr.count("run\n") == 1


@pytest.mark.more
def test_a_policy_of_a_file_is_served_by_whoever_starts_the_server(
    forking: Forks, policy_file: str
) -> None:
    Path("serve.toml").write_text('[engine]\npolicy = "mine.py:Mine:book=of_file"\n')
    for arguments, environment, book in (
        (("--policy", "mine.py:Mine:book=of_flag"), {}, "of_flag"),
        ((), {"AIOSERVE_POLICY": "mine.py:Mine:book=of_variable"}, "of_variable"),
        (("--config", "serve.toml"), {}, "of_file"),
    ):
        with ServerProcess(*arguments, forks=forking, **environment) as server:
            body = {"model": "pyhelp", "prompt": "a", "max_tokens": 1}
            url = f"{server.url}/v1/completions"
            assert not Path(book).exists()
            assert httpx.post(url, json=body, timeout=160).status_code == 200
            assert Path(book).exists()
            named = httpx.post(url, json=body | {"policy": "mine.py:Mine"}, timeout=160)
            assert named.status_code == 400
            assert "policy isn't supported" in named.json()["error"]["message"]
            server.send(signal.SIGTERM)
            assert server.exit_code() == 0


def test_show_config_shows_a_policy_of_a_file_as_it_is_given_and_runs_nothing(
    aioserve_here: Run, policy_file: str
) -> None:
    policy = "./broken.py:Mine:most=3"
    done = aioserve_here("serve", "--policy", policy, "--show-config")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["engine"]["policy"] == policy
    nowhere = aioserve_here("serve", "--policy", "./nowhere.py:Mine", "--show-config")
    assert nowhere.returncode != 0
    assert "there is no file" in nowhere.stderr


@pytest.mark.more
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_a_drafter_of_a_file_drafts_and_what_it_prints_is_no_result(
    aioserve_here: Run, drafter_file: str, kind: str
) -> None:
    drafter = f"{drafter_file}:Mine:most=2"
    load = ("--num-prompts", 2, "--input-len", 12, "--output-len", 20)
    command = ("bench", kind, "pyhelp", *load, "--speculation", drafter, "--json", "-")
    done = aioserve_here(*command)
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["stats"]["tokens_drafted"]) > 0
    assert done.stderr.count("run\n") == 1


def test_a_drafter_of_a_file_is_checked(aioserve_here: Run, drafter_file: str) -> None:
    done = aioserve_here("plugins", "check", f"{drafter_file}:Mine:most=2", "--examples", 20)
    assert done.returncode == 0, done.stderr
    said = f"drafter {drafter_file}:Mine:most=2 keeps its contract: 20 random examples; behind"
    assert done.stdout.startswith(said)
    assert done.stderr == "run\n"


def test_show_config_shows_a_drafter_of_a_file_as_it_is_given_and_runs_nothing(
    aioserve_here: Run, drafter_file: str
) -> None:
    done = aioserve_here("serve", "--speculation", "./broken.py:Mine:most=3", "--show-config")
    assert done.returncode == 0, done.stderr
    shown = tomllib.loads(done.stdout)["engine"]
    assert "./broken.py:Mine:most=3" in str(shown)
    nowhere = aioserve_here("serve", "--speculation", "./nowhere.py:Mine", "--show-config")
    assert nowhere.returncode == 2
    assert "drafter './nowhere.py:Mine': there is no file" in nowhere.stderr
