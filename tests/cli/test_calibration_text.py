"""Text for the calibration of `aioserve quantize`: the part that is used, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aioserve.cli._calibration_text import calibration_windows
from aioserve.errors import ConfigError
from aioserve.models.files import model_files
from aioserve.models.model_files import ModelFiles

TEXT = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return model_files(tiny_model)


def test_windows_come_from_all_over_the_text(tmp_path: Path, files: ModelFiles) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT.read_text()[:9000])
    windows = calibration_windows(files, text, None)
    tokenizer = files.tokenizer()
    ids = tokenizer.encode_plain(text.read_text())
    before = tokenizer.encode("a")[: tokenizer.frame[0]]
    size = min(512, files.config().max_position_embeddings)
    assert {len(window) for window in windows} == {size}
    assert all(window[: len(before)].tolist() == before for window in windows)
    inner = np.concatenate([window[len(before) :] for window in windows])
    assert inner.tolist() == ids[: len(inner)]
    assert len(ids) - len(inner) < size
    few = calibration_windows(files, text, 1024)
    assert len(few) == max(1, 1024 // size) < len(windows)
    assert few[0].tolist() == windows[0].tolist()
    chosen = [next(i for i, w in enumerate(windows) if np.array_equal(w, one)) for one in few]
    assert chosen == sorted(set(chosen))
    assert chosen[-1] >= len(windows) * (len(few) - 1) // len(few)


def test_lines_of_json_are_texts_and_chats(tmp_path: Path, files: ModelFiles) -> None:
    file, plain = tmp_path / "texts.jsonl", tmp_path / "plain"
    parts = TEXT.read_text()[:6000].split("\n\n")
    file.write_text("\n".join(json.dumps({"text": part}) for part in parts) + "\n\n")
    tokenizer = files.tokenizer()
    ids = [one for part in parts for one in tokenizer.encode_plain(part)]
    windows = calibration_windows(files, file, None)
    before = tokenizer.frame[0]
    inner = np.concatenate([window[before:] for window in windows])
    assert inner.tolist() == ids[: len(inner)]
    assert not plain.exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2 of .* must be JSON"),
        ("[1]", 'line 2 of .* must be an object with "text" or "messages"'),
        ('{"text": 3}', "line 2"),
        ('{"text": "\\ud800"}', "line 2 of .* can't be encoded"),
        ('{"messages": [{"role": 3}]}', "line 2 of"),
        ("[" * 100_000, "line 2 of .* must be JSON"),
    ],
)
def test_a_line_that_is_something_else_is_named(
    tmp_path: Path, files: ModelFiles, line: str, named: str
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "one"}) + "\n" + line)
    with pytest.raises(ConfigError, match=named):
        calibration_windows(files, file, None)


def test_too_little_text_and_numbers_out_of_bounds_are_named(
    tmp_path: Path, files: ModelFiles
) -> None:
    file = tmp_path / "text"
    file.write_text("little")
    with pytest.raises(ConfigError, match=r"must have at least 1024 tokens, got \d+ token"):
        calibration_windows(files, file, None)
    for number in (1023, (1 << 22) + 1):
        with pytest.raises(ConfigError, match=f"calibration_tokens must be in .*, got {number}"):
            calibration_windows(files, file, number)
