"""Chat templates of a model directory, and the special tokens that they name.

Knows the files and Hugging Face's conventions for them. Must not know what a template is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.arguments import shown
from aioserve.errors import ModelError
from aioserve.json_file import read_file, read_json_object

__all__ = [
    "ADDITIONAL",
    "DEFAULT",
    "TOOL_USE",
    "NamedSource",
    "read_source",
    "read_sources",
    "read_tokens",
]

MAX_FILE_BYTES = 1 << 22
"""Largest size of a file with a chat template or with names of tokens, in bytes."""
MAX_NAMED = 64
"""Most templates in `ADDITIONAL`."""
ADDITIONAL = "additional_chat_templates"
"""Directory of named templates, NAME.jinja each."""
DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template for prompts with tools."""
_CONFIG = "tokenizer_config.json"
_TOKEN_NAMES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class NamedSource(NamedTuple):
    """A template's text, and the file that it is from."""

    source: str
    origin: str


def read_source(file: Path) -> NamedSource:
    """Return the template in a file of UTF-8. Raises `ModelError` naming it."""
    try:
        return NamedSource(read_file(file, MAX_FILE_BYTES).decode("utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not valid UTF-8: {error}") from error


def read_sources(directory: Path) -> dict[str, NamedSource]:
    """Return templates by name, `DEFAULT` among them; empty without any.

    They are in chat_template.jinja and in additional_chat_templates/NAME.jinja. In their absence,
    they are `chat_template` of tokenizer_config.json: a string, or a list of named templates. A
    single one is the default, whatever its name. Raises `ModelError` naming the file.
    """
    sources = _in_files(directory)
    if DEFAULT not in sources:
        config_file = directory / _CONFIG
        sources = _in_config(_read_config(config_file), config_file) | sources
    if len(sources) == 1:
        return {DEFAULT: next(iter(sources.values()))}
    if sources and DEFAULT not in sources:
        file = next(iter(sources.values())).origin
        raise ModelError(
            f"{file}: chat_template has no entry named 'default', only {shown(sorted(sources))}"
        )
    return sources


def read_tokens(directory: Path) -> dict[str, str]:
    """Return `bos_token` and the other special tokens, as a template has them."""
    tokens = _special_tokens(_read_config(directory / "special_tokens_map.json"))
    return tokens | _special_tokens(_read_config(directory / _CONFIG))


def _in_files(directory: Path) -> dict[str, NamedSource]:
    files = sorted((directory / ADDITIONAL).glob("*.jinja"))
    if len(files) > MAX_NAMED:
        raise ModelError(
            f"{files[0].parent}: at most {MAX_NAMED} templates are read, got {len(files)}"
        )
    sources = {file.stem: read_source(file) for file in files if file.is_file()}
    if (own := directory / "chat_template.jinja").is_file():
        sources[DEFAULT] = read_source(own)
    return sources


def _in_config(config: Mapping[str, Any], file: Path) -> dict[str, NamedSource]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: NamedSource(value, str(file))}
    named: dict[str, NamedSource] = {}
    for entry in value if isinstance(value, list) else [None]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = NamedSource(template, str(file))
            case _:
                raise ModelError(
                    f"{file}: chat_template must be a string or a list of named templates, "
                    f'{{"name": str, "template": str}} each, got {shown(entry or value)}'
                )
    if not named:
        raise ModelError(f"{file}: chat_template has no entry named 'default', only []")
    return named


def _read_config(file: Path) -> dict[str, Any]:
    return read_json_object(file, MAX_FILE_BYTES) if file.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a config, each a string or an object with `content`."""
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(f"{name}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[f"{name}_token"] = value
    return tokens
