"""Command lines of other engines are answered with the names that options have here."""

from __future__ import annotations

import pytest

from tests.cli.command import Run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run pyhelp hi -n 5", "-n isn't an option here: it is --max-tokens"),
        (
            "run -m x.gguf -p hi",
            "-m isn't an option here: the model comes first, without an option",
        ),
        ("run pyhelp hi -ngl 99", "all layers are on one device, which --device names"),
        ("run pyhelp --no-conversation hi", "it is --raw"),
        (
            "run pyhelp hi --num-ctx 5",
            "it is --max-model-len (an argument of Engine, and an option",
        ),
        ("run pyhelp hi --model-draft x", "it is --speculation model:path=PATH"),
        (
            "run pyhelp hi --timeout 3",
            "it is deadline_seconds (an argument of stream, generate and",
        ),
        (
            "run pyhelp hi --min-p 3",
            "min_p is an argument of SamplingParams, and a field of requests",
        ),
        ("run pyhelp hi --tensor-parallel-size=2", "several GPUs aren't supported"),
        ("chat pyhelp -n 5", "it is --max-tokens"),
        ("serve pyhelp -tp 2", "a model runs on one device: several GPUs aren't supported"),
        ("serve pyhelp -c 4096", "it is --max-model-len"),
        ("serve pyhelp --max-running-req 3", "it is --max-num-seqs"),
        ("serve pyhelp --prefill-budget 3", "it is --max-num-batched-tokens"),
        ("serve pyhelp --enable-prefix-caching", "cached unless --no-prefix-caching is given"),
        ("serve pyhelp --gpu_memory_utilization=0.5", "it is --memory-utilization"),
        ("serve pyhelp --speculative-config={}", "it is --speculation: ngram, suffix"),
        ("serve pyhelp --repeat-penalty 1.1", "it is repetition_penalty (an argument of Sampling"),
        ("bench throughput -n 5", "it is --output-len"),
        ("bench serve http://127.0.0.1:1 --request-rate 4", "it is --rate"),
        ("bench serve http://127.0.0.1:1 --save-result x", "it is --json FILE"),
        ("plan pyhelp --tp 2", "it is --num-gpus"),
        ("plan pyhelp --enforce-eager", "it is --no-capture-graphs (an argument of Engine, and an"),
    ],
)
def test_every_command_answers_in_a_line(words: str, told: str, aioserve_here: Run) -> None:
    result = aioserve_here(*words.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert "isn't an option here: " in result.stderr
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_typo_of_an_option_names_that_option(aioserve_here: Run) -> None:
    result = aioserve_here("run", "pyhelp", "hi", "--max-toknes", "5")
    assert "Did you mean --max-tokens?" in result.stderr
