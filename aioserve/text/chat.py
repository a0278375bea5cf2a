"""Chat messages to a prompt, through the model's own template.

Knows the template files of a model directory and Hugging Face's conventions for them. Renders
nothing but these: what a caller sends is data for the template, never a template. Rendering may be
slow (a template is a program), so callers run it in a thread.

Rendered by minijinja, which is Jinja2 except where it isn't. Of what chat templates use, Python's
methods of str, dict and list are there (`strip`, `split`, `startswith`, `items`, `get`, ...), as
are namespaces, macros, loop controls and slices; `{% generation %}` marks are dropped. Not there
are `%`-formatting, attributes of Python objects and `import` of other templates; a template that
needs them fails at load (syntax) or when it is rendered, with the place named. One quiet
difference is known: trimming takes the control characters U+001C to U+001F for text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import minijinja

from aioserve.errors import InvalidPromptError, ModelError, RequestFailedError
from aioserve.text.messages import validate_messages

__all__ = ["ChatTemplate"]

_TEMPLATE_NAME = "chat_template"
_TOKEN_NAMES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
# Marks the assistant's part for training; it has no effect on the text.
_GENERATION_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class ChatTemplate:
    """A compiled chat template and the model's special tokens.

    `special_tokens` are variables of the template, such as `bos_token`. `origin` names the
    template in errors. Raises `ModelError` if `source` isn't a valid template. Thread-safe.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, origin: str
    ) -> None:
        self.origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._environment = minijinja.Environment(
            filters={"tojson": _to_json},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
            auto_escape_callback=_never_escape,
            # The debug report would put the caller's messages into errors and logs.
            debug=False,
            trim_blocks=True,
            lstrip_blocks=True,
            pycompat=True,
        )
        try:
            self._environment.add_template(_TEMPLATE_NAME, _without_generation_marks(source))
        except minijinja.TemplateError as error:
            raise ModelError(
                f"{origin}: the chat template can't be read: {error.message}"
            ) from error

    @classmethod
    def from_directory(cls, path: Path | str) -> ChatTemplate | None:
        """The template of a model directory, or None if it has none.

        Looks for chat_template.jinja, then for `chat_template` in tokenizer_config.json: a string,
        or a list of named templates, of which "default" is taken. Raises `ModelError` naming the
        file.
        """
        config_file = Path(path) / "tokenizer_config.json"
        config = _read_json(config_file)
        origin = Path(path) / "chat_template.jinja"
        if origin.is_file():
            source = origin.read_text(encoding="utf-8")
        else:
            origin = config_file
            source = _source_in_config(config, config_file)
        if source is None:
            return None
        tokens = _special_tokens(_read_json(Path(path) / "special_tokens_map.json"))
        tokens.update(_special_tokens(config))
        return cls(source, special_tokens=tokens, origin=str(origin))

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages`, special tokens written out: encode it without adding any.

        Raises `InvalidPromptError` for malformed messages and where the template itself
        refuses them (its `raise_exception`), `RequestFailedError` if the template breaks.
        """
        checked = validate_messages(messages)
        try:
            return self._environment.render_template(
                _TEMPLATE_NAME,
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except _Refused as error:
            raise InvalidPromptError(f"the model's chat template refused: {error}") from error
        except Exception as error:
            raise RequestFailedError(f"{self.origin}: rendering failed: {error}") from error


class _Refused(Exception):
    """What a template says through `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: unlike Jinja's own, nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators is not None else None,
        sort_keys=sort_keys,
    )


def _never_escape(_name: str) -> bool:
    return False


def _without_generation_marks(source: str) -> str:
    """A block that is always taken has the same text and the same whitespace rules."""

    def plain_block(mark: re.Match[str]) -> str:
        left, end, right = mark.groups()
        return f"{{%{left} {'endif' if end else 'if true'} {right}%}}"

    return _GENERATION_MARK.sub(plain_block, source)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _source_in_config(config: dict[str, Any], file: Path) -> str | None:
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{file}: chat_template must be a string or a list of named templates"
        ) from error
    if len(named) == 1:
        return next(iter(named.values()))
    if "default" not in named:
        raise ModelError(
            f"{file}: chat_template has no entry named 'default', only {sorted(named)}"
        )
    return named["default"]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin, each a string or an object with `content`."""
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(f"{name}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[f"{name}_token"] = value
    return tokens
