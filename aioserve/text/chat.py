"""Turns chat messages into a prompt, by the model's own template.

Knows the template files of a model directory and Hugging Face's conventions for them. Renders
nothing but these: what a caller sends is data for the template, never a template. Rendering may be
slow (a template is a program, within a `template_budget`), so callers run it in a thread.

Rendered by minijinja, which is Jinja2 except where it isn't. Of what chat templates use, Python's
methods of str, dict and list are there (`strip`, `split`, `startswith`, `items`, `get`, ...), as
are namespaces, macros, loop controls and slices; `{% generation %}` marks are dropped. Not there
are `%`-formatting, some methods (`rsplit`, `removeprefix`, `index`), attributes of Python objects
and `import` of other templates; a template that needs them fails at load (syntax) or when it is
rendered, with the place named. One quiet difference is known: trimming takes the control characters
U+001C to U+001F for text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import minijinja
import msgspec

from aioserve.arguments import shown
from aioserve.errors import InvalidPromptError, ModelError, PromptTooLongError, RequestFailedError
from aioserve.json_file import read_file, read_json_object
from aioserve.text import template_budget
from aioserve.text.carried_forms import Form, forms_of, preferred_form, shaped
from aioserve.text.conversation import Conversation, conversation_of
from aioserve.text.escape_special import Escapes
from aioserve.text.harmony_messages import with_joined_instructions, with_single_calls
from aioserve.text.messages import Message
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

MAX_ERROR_CHARS = 1000
MAX_INDENT = 64
MAX_FILE_BYTES = 1 << 22
"""Largest size of a file with a chat template or with names of tokens."""
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
        self._file = Path(origin).name
        """Name of the file in errors of requests, whose senders needn't know the path."""
        self.source: str = source
        """Source as it was written, in which names are looked for."""
        self._is_harmony = HarmonyParser.reads(source)
        self._special_tokens = dict(special_tokens or {})
        self._source = template_budget.asking(_without_generation_marks(source), origin)
        self._environments: dict[int, minijinja.Environment] = {}
        """Environments by the instructions that a rendering may take."""
        self._environment(template_budget.FUEL)

    @classmethod
    def from_directory(
        cls, path: Path | str, file: Path | str | None = None
    ) -> ChatTemplate | None:
        """The template of a model directory, or None if it has none.

        Looks for chat_template.jinja, then for `chat_template` in tokenizer_config.json: a string,
        or a list of named templates, of which "default" is taken. `file` is a template in their
        place. Raises `ModelError` naming the file.
        """
        directory = Path(path)
        config_file = directory / "tokenizer_config.json"
        config = _read_config(config_file)
        tokens = _special_tokens(_read_config(directory / "special_tokens_map.json"))
        tokens.update(_special_tokens(config))
        if file is None and (own := directory / "chat_template.jinja").is_file():
            file = own
        if file is not None:
            return cls.from_file(file, special_tokens=tokens)
        source = _source_in_config(config, config_file)
        if source is None:
            return None
        return cls(source, special_tokens=tokens, origin=str(config_file))

    @classmethod
    def from_file(
        cls, file: Path | str, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """The template in `file`, in UTF-8. Raises `ModelError` naming it."""
        try:
            source = read_file(Path(file), MAX_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{file}: not valid UTF-8: {error}") from error
        return cls(source, special_tokens=special_tokens, origin=str(file))

    def reads(self, name: str) -> bool:
        """Whether a variable of that name is read anywhere in the template."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def has_role(self, role: str) -> bool:
        """Whether messages of that role are looked for in the template, which quotes it then."""
        return re.search(rf"""(["']){re.escape(role)}\1""", self.source) is not None

    def check_read(self, conversation: Conversation) -> None:
        """Raise `InvalidPromptError` for tools or arguments that the template doesn't read."""
        if conversation.tools and not self.reads("tools"):
            raise InvalidPromptError(
                f"tools are not supported: the chat template {self._file} doesn't read them",
                argument="tools",
            )
        for name in conversation.template_kwargs:
            if name in self._special_tokens or not self.reads(name):
                why = "has a value of its own for it" if self.reads(name) else "doesn't read it"
                raise InvalidPromptError(
                    f"chat_template_kwargs must not have {name!r}: the chat template {self._file} "
                    f"{why}",
                    argument="chat_template_kwargs",
                    value=name,
                )

    def render(
        self, messages: Conversation | Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages`, special tokens written out: encode it without adding any.

        Raises `InvalidPromptError` for malformed messages and where the template itself
        refuses them (its `raise_exception`), `RequestFailedError` if the template breaks.
        Contents that are None and arguments of calls come in the first of their `carried_forms`
        that the template takes.
        `add_generation_prompt` is that of a `Conversation` where it is one.
        """
        return self._rendered(self._checked(messages, add_generation_prompt))

    def encode(
        self,
        messages: Conversation | Sequence[Message],
        tokenizer: Tokenizer,
        *,
        special_tokens_in_messages: bool = False,
        max_chars: int | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the prompt for `messages`.

        Special tokens come from the template alone: their names in messages are ordinary text,
        unless `special_tokens_in_messages`. Raises as `render` does, and `InvalidPromptError` where
        the text of messages would become a special token all the same, which takes a template that
        rewrites contents. A rendered text of more than `max_chars`, or more than `max_tokens`, is a
        `PromptTooLongError`.
        """
        checked = self._checked(messages)
        if special_tokens_in_messages or not (specials := tokenizer.special_tokens).is_needed:
            text = self._rendered(checked)
            _check_chars(len(text), max_chars)
            return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        escaped, escapes = specials.escaped(checked, apart_from=self._source)
        text = self._rendered(escaped, escapes)
        _check_chars(len(text), max_chars)
        spans = specials.find(text, escapes)

        def written(other: Conversation) -> list[int] | None:
            """The special tokens of the prompt with other texts; None if it has none then."""
            try:
                rendered = self._rendered(other, escapes)
            except (InvalidPromptError, RequestFailedError):
                return None  # the template reads in texts, and what it reads means nothing
            return [span.token_id for span in specials.find(rendered, escapes)]

        tokens = [span.token_id for span in spans]
        expected = written(specials.meaningless(escaped))
        if tokens != expected and (
            # The template looks at contents. May it, or does it write what they dictate?
            specials.may_spell(Counter(tokens) - Counter(expected or ()), escaped)
            or tokens != written(specials.unmarked(escaped))
        ):
            others = "none" if expected is None else len(expected)
            raise InvalidPromptError(
                f"the text of messages must not change which special tokens the prompt has, but "
                f"the chat template {self._file} writes {len(tokens)} with these contents and "
                f"{others} with others; special_tokens_in_messages=True allows it"
            )
        return specials.encode(text, escapes, spans, max_tokens=max_tokens)

    def _checked(
        self, messages: Conversation | Sequence[Message], add_generation_prompt: bool = True
    ) -> Conversation:
        if not isinstance(messages, Conversation):
            messages = conversation_of(messages, add_generation_prompt=add_generation_prompt)
        self.check_read(messages)
        return messages.validated()

    def _environment(self, fuel: int) -> minijinja.Environment:
        if (known := self._environments.get(fuel)) is not None:
            return known
        environment = minijinja.Environment(
            filters={"tojson": _to_json},
            tests={"callable": callable, "sequence": _is_sequence},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
            auto_escape_callback=_never_escape,
            # The debug report would put the caller's messages into errors and logs.
            debug=False,
            fuel=fuel,
            trim_blocks=True,
            lstrip_blocks=True,
            pycompat=True,
        )
        try:
            environment.add_template(_TEMPLATE_NAME, self._source)
        except minijinja.TemplateError as error:
            raise ModelError(
                f"{self.origin}: the chat template can't be read: {_brief(error.message)}"
            ) from error
        self._environments[fuel] = environment
        return environment

    def _rendered(self, checked: Conversation, escapes: Escapes | None = None) -> str:
        """The text, of the first form of the conversation that the template takes."""
        refused: InvalidPromptError | RequestFailedError | None = None
        for form in forms_of(checked, self._form):
            try:
                return self._render(shaped(checked, form), escapes)
            except _StoppedError:
                raise
            except (InvalidPromptError, RequestFailedError) as error:
                refused = refused or error
        raise refused or RequestFailedError(f"{self._file}: nothing was rendered")

    @cached_property
    def _form(self) -> Form:
        return preferred_form(self._render, reads_tools=self.reads("tools"))

    def _render(self, checked: Conversation, escapes: Escapes | None = None) -> str:
        fuel = template_budget.fuel_for(checked.num_items)
        budget = template_budget.Budget(checked.num_items, checked.num_chars)
        mark = ""
        if checked.continue_final_message:
            checked, mark = _marked(checked)
        messages = checked.messages
        if self._is_harmony:
            messages = with_single_calls(messages)
            if "messages[0]" in self.source:
                messages = with_joined_instructions(messages)
        try:
            text = self._environment(fuel).render_template(
                _TEMPLATE_NAME,
                **checked.template_kwargs,
                messages=[_with_aliases(message) for message in messages],
                add_generation_prompt=checked.add_generation_prompt,
                tools=checked.tools,
                documents=None,
                **{template_budget.SPEND: budget.spend},
                **self._special_tokens,
            )
        except _Refused as error:
            refusal = _brief(error if escapes is None else escapes.unescape(str(error)))
            raise InvalidPromptError(f"the model's chat template refused: {refusal}") from error
        except template_budget.BudgetSpentError as error:
            raise _StoppedError(f"{self._file}: rendering was stopped: {error}") from error
        except BaseException as error:
            # A panic of the library's is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if getattr(error, "kind", None) == "OutOfFuel":
                raise _StoppedError(
                    f"{self._file}: rendering was stopped: it took more than {fuel} instructions"
                ) from error
            raise RequestFailedError(f"{self._file}: rendering failed: {_brief(error)}") from error
        return _cut_at(text, mark) if mark else text


def _with_aliases(message: dict[str, Any]) -> dict[str, Any]:
    """Add the older name of reasoning, by which some templates (gpt-oss's) read it."""
    if "reasoning_content" not in message:
        return message
    return {"thinking": message["reasoning_content"], **message}


def _marked(conversation: Conversation) -> tuple[Conversation, str]:
    """The conversation with a mark at the end of its last content."""
    *before, last = conversation.messages
    mark = f"\ue000{secrets.token_hex(8)}\ue001"
    # A template that trims takes the space away.
    last = last | {"content": f"{last['content']}{mark} "}
    return msgspec.structs.replace(conversation, messages=[*before, last]), mark


def _cut_at(text: str, mark: str) -> str:
    """The text before the mark, without what was written after the content."""
    if (at := text.rfind(mark)) < 0:
        raise InvalidPromptError(
            "continue_final_message needs a chat template that writes the last message's content "
            "as it is",
            argument="continue_final_message",
        )
    kept = text[:at]
    return kept if text[at + len(mark) : at + len(mark) + 1] == " " else kept.rstrip()


def _check_chars(chars: int, limit: int | None) -> None:
    if limit is not None and chars > limit:
        raise PromptTooLongError(
            f"prompt has {chars} characters when it is rendered; {limit} are read at most",
            value=chars,
            limit=limit,
            unit="characters",
        )


def _brief(error: object) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


class _StoppedError(RequestFailedError):
    """A rendering took too much; another form would as well."""


class _Refused(Exception):
    """Refusal of a template through `raise_exception`."""


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
    if indent is not None and indent > MAX_INDENT:
        raise ValueError(f"indent of tojson must be at most {MAX_INDENT}, got {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators is not None else None,
        sort_keys=sort_keys,
    )


def _is_sequence(value: Any) -> bool:
    """Whether Jinja takes it for a sequence: strings and mappings are sequences too."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _never_escape(_name: str) -> bool:
    return False


def _without_generation_marks(source: str) -> str:
    """Replace generation marks by a block that is always taken: text and white space stay the
    same."""

    def plain_block(mark: re.Match[str]) -> str:
        left, end, right = mark.groups()
        return f"{{%{left} {'endif' if end else 'if true'} {right}%}}"

    return _GENERATION_MARK.sub(plain_block, source)


def _read_config(file: Path) -> dict[str, Any]:
    return read_json_object(file, MAX_FILE_BYTES) if file.is_file() else {}


def _source_in_config(config: dict[str, Any], file: Path) -> str | None:
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise ModelError(
                    f"{file}: chat_template must be a string or a list of named templates, "
                    f'{{"name": str, "template": str}} each, got {shown(entry or value)}'
                )
    if len(named) == 1:
        return next(iter(named.values()))
    if "default" not in named:
        raise ModelError(
            f"{file}: chat_template has no entry named 'default', only {shown(sorted(named))}"
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
