"""`aioserve evaluate` gives transformers' perplexity and divergence, and refuses the rest."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from aioserve.testing.random_model import write_random_model
from tests.cli.command import Run

TEXT = "Supermarkets have an express lane: who buys three things needn't wait. Ütf-8, 木, 🙂!\n" * 5
BOS = 300


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model with the same shape and tokenizer, and other weights."""
    config = json.loads((tiny_model / "config.json").read_text())
    directory = tmp_path_factory.mktemp("models") / "other"
    return write_random_model(directory, config, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def bos_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token before each text."""
    directory = tmp_path_factory.mktemp("models") / "with-bos"
    shutil.copytree(tiny_model, directory)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    name = tokenizer.id_to_token(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, BOS)])
    tokenizer.save(file)
    return directory


def transformers_rows(model: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after each of `ids`, float64 `[ids, V]`."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return loaded(torch.tensor([ids])).logits[0].double().log_softmax(1)


def ids_of(model: Path, text: str = TEXT) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def guided_rows(
    model: Path, ids: list[int], context: int, stride: int, before: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Rows for each scored token, and these tokens. The windows are those of transformers' guide to
    perplexity."""
    rows, targets, scored = [], [], 0 if before else 1
    size = context - len(before)
    for begin in range(0, len(ids), stride):
        end = min(begin + size, len(ids))
        every = transformers_rows(model, before + ids[begin:end])
        rows.append(every[len(before) + scored - begin - 1 : len(before) + end - begin - 1])
        targets += ids[scored:end]
        scored = end
        if end == len(ids):
            break
    return torch.cat(rows), targets


def nats_of(rows: torch.Tensor, targets: list[int]) -> float:
    return -rows[torch.arange(len(targets)), torch.tensor(targets)].mean().item()


def test_perplexity_is_that_of_transformers_in_the_same_windows(
    aioserve_here: Run, tiny_model: Path, text: Path
) -> None:
    done = aioserve_here(
        "evaluate", tiny_model, "--text", text, "--context", 100, "--stride", 37, "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ids = ids_of(tiny_model)
    nats = nats_of(*guided_rows(tiny_model, ids, 100, 37, []))
    (model,) = result["models"]
    assert model["nats_per_token"]["value"] == pytest.approx(nats, rel=1e-5)
    assert model["perplexity"]["value"] == pytest.approx(math.exp(nats), rel=1e-4)
    num_bytes = len(TEXT.encode())
    assert result["text"] == {
        "file": "text.txt",
        "tokens": len(ids),
        "bytes": num_bytes,
        "scored_tokens": len(ids) - 1,
        "scored_bytes": num_bytes - 1,
    }
    bits = nats / math.log(2) * (len(ids) - 1) / (num_bytes - 1)
    assert model["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    for name in ("perplexity", "nats_per_token", "bits_per_byte"):
        assert model[name]["low"] < model[name]["value"] < model[name]["high"]
    assert model["computed_tokens"] > len(ids)
    assert "comparison" not in result


@pytest.mark.parametrize("stride", [30, 99])
def test_a_token_that_the_model_expects_before_a_text_is_before_each_window(
    aioserve_here: Run, bos_model: Path, text: Path, stride: int
) -> None:
    done = aioserve_here(
        *("evaluate", bos_model, "--text", text, "--json", "-"),
        *("--context", 100, "--stride", stride, "--max-tokens", 250),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["windows"]["tokens_before"] == [BOS]
    assert result["text"]["scored_tokens"] == 250
    assert result["interval"]["blocks"] is None
    nats = nats_of(*guided_rows(bos_model, ids_of(bos_model)[:250], 100, stride, [BOS]))
    assert result["models"][0]["nats_per_token"]["value"] == pytest.approx(nats, rel=1e-5)
    assert result["models"][0]["nats_per_token"]["low"] is None


def test_second_halves_are_scored_as_llama_cpp_does(
    aioserve_here: Run, bos_model: Path, text: Path
) -> None:
    done = aioserve_here(
        *("evaluate", bos_model, "--text", text, "--json", "-", "--context", 64),
        "--second-halves",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    stream = [BOS, *ids_of(bos_model)]
    every = []
    for start in range(0, len(stream) // 64 * 64, 64):
        chunk = [BOS, *stream[start + 1 : start + 64]]
        rows = transformers_rows(bos_model, chunk)
        every += [-rows[place, chunk[place + 1]].item() for place in range(32, 63)]
    assert result["text"]["scored_tokens"] == len(every)
    nats = result["models"][0]["nats_per_token"]["value"]
    assert nats == pytest.approx(sum(every) / len(every), rel=1e-5)


@pytest.mark.more
def test_divergence_is_that_of_transformers_distributions(
    aioserve_here: Run, tiny_model: Path, other_model: Path, text: Path
) -> None:
    words = ("evaluate", other_model, "--text", text, "--reference", tiny_model)
    done = aioserve_here(*words, "--context", 64, "--json", "-", "--concurrency", 5)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ids = ids_of(tiny_model)
    ours, targets = guided_rows(other_model, ids, 64, 32, [])
    theirs, _ = guided_rows(tiny_model, ids, 64, 32, [])
    kl_nats = (theirs.exp() * (theirs - ours)).sum(1)
    found = result["comparison"]
    assert found["kl_nats_per_token"]["value"] == pytest.approx(kl_nats.mean().item(), rel=1e-4)
    assert found["kl_nats_max"] == pytest.approx(kl_nats.max().item(), rel=1e-4)
    same = (ours.argmax(1) == theirs.argmax(1)).double().mean().item()
    assert found["same_top_token"]["value"] == pytest.approx(same)
    ratio = math.exp(nats_of(ours, targets) - nats_of(theirs, targets))
    assert found["perplexity_ratio"]["value"] == pytest.approx(ratio, rel=1e-4)
    assert [one["model"] for one in result["models"]] == ["other", "tiny"]
    again = json.loads(aioserve_here(*words, "--context", 64, "--json", "-").stdout)
    assert again["comparison"] == found


@pytest.mark.more
def test_a_model_is_not_apart_from_itself_and_hardly_in_fewer_bits(
    aioserve_here: Run, tiny_model: Path, text: Path, tmp_path: Path
) -> None:
    words = ("evaluate", tiny_model, "--text", text, "--reference", tiny_model)
    written = tmp_path / "result.json"
    done = aioserve_here(*words, "--json", written)
    assert done.returncode == 0, done.stderr
    assert "KL divergence          0.000000 ± 0.000000 nats per token" in done.stdout
    assert "ratio of perplexities  1.00000 ± 0.00000" in done.stdout
    assert "± is half of the 95% interval, from 30 blocks" in done.stdout
    assert json.loads(written.read_text())["comparison"]["same_top_token"]["value"] == 1
    done = aioserve_here(*words, "--dtype", "bfloat16", "--json", "-")
    found = json.loads(done.stdout)
    assert [one["dtype"] for one in found["models"]] == ["bfloat16", "float32"]
    assert 0 < found["comparison"]["kl_nats_per_token"]["value"] < 0.01


def test_the_reference_is_taken_as_it_is_stored(
    aioserve_here: Run, tiny_model: Path, text: Path
) -> None:
    done = aioserve_here(
        *("evaluate", tiny_model, "--text", text, "--reference", tiny_model, "--json", "-"),
        *("--quantization", "int4", "--max-tokens", 60),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    model, reference = [" ".join(one["weight_bytes"]) for one in result["models"]]
    assert "int4" in model
    assert "int" not in reference
    assert result["comparison"]["kl_nats_per_token"]["value"] > 1e-4


def test_a_context_that_is_not_given_is_one_that_the_model_has(
    aioserve_here: Run, tmp_path: Path, tiny_model: Path, text: Path
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    model = write_random_model(tmp_path / "short", {**config, "max_position_embeddings": 64})
    done = aioserve_here("evaluate", model, "--text", text, "--json", "-")
    assert done.returncode == 0, done.stderr
    windows = json.loads(done.stdout)["windows"]
    assert (windows["context"], windows["stride"]) == (63, 31)


# -- refusals


def refused(done: Any) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("aioserve: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("aioserve: ").rstrip()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "text: {} must not be empty"),
        (b"ab\xffc", "text: {} must be UTF-8, got byte 0xff at offset 2"),
        (b"a" * ((1 << 24) + 1), "text: {} must have at most 16777216 bytes, got more"),
        (b"a", "text must have at least 2 tokens, got 1 token"),
    ],
    ids=["empty", "no text", "too large", "one token"],
)
def test_a_file_that_is_no_text_to_measure_on_is_refused(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path, contents: bytes, message: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(contents)
    done = aioserve_here("evaluate", tiny_model, "--text", path)
    assert refused(done) == message.format(path)


def test_a_file_that_is_not_there_is_named(aioserve_here: Run, tiny_model: Path) -> None:
    done = aioserve_here("evaluate", tiny_model, "--text", "nowhere.txt")
    assert refused(done) == "text: nowhere.txt can't be read: No such file or directory"
    done = aioserve_here("evaluate", tiny_model, "--text", ".")
    assert refused(done) == "text: . can't be read: Is a directory"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--context", 1), "context must be in [2, 16777216], got 1"),
        (("--stride", 0), "stride must be in [1, 16777216], got 0"),
        (("--context", 64, "--stride", 65), "stride must be in [1, 64], got 65"),
        (("--context", 64, "--stride", 64), "stride must be at most 63 with a context of 64"),
        (("--context", 512), "context=512 takes a max_model_len of 513: max_model_len must be in "),
        (("--max-tokens", 1), "max_tokens must be in [2, 16777216], got 1"),
        (("--concurrency", 0), "concurrency must be in [1, 1024], got 0"),
        (("--second-halves", "--stride", 9), "stride has no effect with --second-halves"),
        (
            ("--second-halves", "--max-tokens", 99, "--context", 100),
            "text must have at least 100 tokens for a whole chunk of 100, got 99 tokens",
        ),
        (("--reference-dtype", "float32"), "reference_dtype goes with --reference"),
        (("--reference-architecture", "llama"), "reference_architecture goes with --reference"),
        (("--dtype", "float8"), "dtype must be one of"),
        (("--json", "nowhere/x.json"), "json: nowhere/x.json can't be written"),
        (("--reference", "nosuch"), "model 'nosuch' not found"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    aioserve_here: Run, tiny_model: Path, text: Path, words: tuple[object, ...], message: str
) -> None:
    done = aioserve_here("evaluate", tiny_model, "--text", text, *words)
    assert message in refused(done)


def rewritten(model: Path, directory: Path, change: Any) -> Path:
    """Copy of a model with another tokenizer."""
    shutil.copytree(model, directory)
    file = directory / "tokenizer.json"
    contents = json.loads(file.read_text())
    change(contents)
    file.write_text(json.dumps(contents))
    return directory


def test_a_reference_with_another_tokenizer_is_refused_with_the_difference(
    aioserve_here: Run, tiny_model: Path, bos_model: Path, text: Path, tmp_path: Path
) -> None:
    def refusal(reference: Path) -> str:
        done = aioserve_here("evaluate", tiny_model, "--text", text, "--reference", reference)
        begin = "reference must have the tokenizer of the model: "
        message = refused(done)
        assert message.startswith(begin)
        return message.removeprefix(begin)

    assert refusal(bos_model) == f"the ids before a text are [] and [{BOS}]"

    def swap(contents: Any) -> None:
        vocabulary = contents["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    place = min(ids_of(tiny_model, "a") + ids_of(tiny_model, "b"))
    assert refusal(rewritten(tiny_model, tmp_path / "swapped", swap)).startswith(f"token {place} ")

    def normalized(contents: Any) -> None:
        contents["normalizer"] = {"type": "Lowercase"}

    message = refusal(rewritten(tiny_model, tmp_path / "lower", normalized))
    assert message.startswith("token 0 of the text is ")

    config = json.loads((tiny_model / "config.json").read_text())
    wider = write_random_model(tmp_path / "wider", {**config, "vocab_size": 384})
    assert refusal(wider) == "vocab_size is 320 and 384"


def test_a_model_without_a_tokenizer_is_refused(
    aioserve_here: Run, tiny_model: Path, text: Path, tmp_path: Path
) -> None:
    model = tmp_path / "bare"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").unlink()
    done = aioserve_here("evaluate", model, "--text", text)
    assert done.returncode == 1
    assert "has no tokenizer" in done.stderr
