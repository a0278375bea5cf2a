"""Prompts from chat messages, by the model's own template.

Only templates of the model or of its operator are rendered: input of a caller is data for the
template, never a template. Rendering may be slow, as a template is a program within a
`template_budget`. So callers run it in a thread.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from aioserve.errors import (
    AioserveError,
    InvalidPromptError,
    ModelError,
    PromptTooLongError,
    RequestFailedError,
)
from aioserve.text.carried_forms import Form, forms_of, preferred_form, shaped
from aioserve.text.conversation import Conversation, conversation_of
from aioserve.text.escape_special import Escapes
from aioserve.text.harmony_messages import with_joined_instructions, with_single_calls
from aioserve.text.messages import Message
from aioserve.text.optional_fields import with_all_fields
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.roles import Roles
from aioserve.text.template_budget import Budget, BudgetSpentError
from aioserve.text.template_engine import RefusedError, Template, TemplateSyntaxError
from aioserve.text.template_files import (
    DEFAULT,
    TOOL_USE,
    read_source,
    read_sources,
    read_tokens,
)
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

MAX_ERROR_CHARS = 1000
MAX_TEMPLATE_CHARS = 1 << 18
_PLAIN = (
    Conversation([{"role": "user", "content": "Hello"}]),
    Conversation(
        [{"role": "user", "content": "Hello"}],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "clock",
                    "description": "Tells the time.",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
    ),
)
"""Conversations of which any working template renders at least one."""


class _FailedError(Exception):
    """A template broke, was stopped or refused; the message says how."""

    def __init__(self, why: str, *, has_refused: bool = False, was_stopped: bool = False) -> None:
        super().__init__(why)
        self.has_refused: bool = has_refused
        self.was_stopped: bool = was_stopped
        """True if it took too much; another form would as well."""


class ChatTemplate:
    """A compiled chat template and the model's special tokens.

    - `special_tokens` are variables of the template, such as `bos_token`.
    - `origin` names the template in errors.
    - `tool_use` is the template of prompts with tools, if the model has a separate one.

    Raises `ModelError` if `source` isn't a valid template. Thread-safe.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.origin = origin
        self._file = Path(origin).name
        """Name of the file in errors of requests, whose senders needn't know the path."""
        self.source: str = source
        """Source as it was written, in which names are looked for."""
        self.tool_use: ChatTemplate | None = tool_use
        self._is_harmony = HarmonyParser.reads(source)
        self._special_tokens = dict(special_tokens or {})
        self._template = _compiled(source, origin)
        self._works: bool | None = None
        self._roles = Roles(source, self._text_of, self._file)

    @classmethod
    def from_directory(
        cls, path: Path | str, file: Path | str | None = None
    ) -> ChatTemplate | None:
        """Return the template of a model directory, with that for tools; None if it has none.

        `read_sources` finds them. `file` is a template in place of all of them. Raises `ModelError`
        naming the file.
        """
        directory = Path(path)
        tokens = read_tokens(directory)
        if file is not None:
            return cls.from_file(file, special_tokens=tokens)
        sources = read_sources(directory)
        if (default := sources.get(DEFAULT)) is None:
            return None
        tool_use = None
        if (named := sources.get(TOOL_USE)) is not None:
            tool_use = cls(named.source, special_tokens=tokens, origin=named.origin)
        source, origin = default
        return cls(source, special_tokens=tokens, origin=origin, tool_use=tool_use)

    @classmethod
    def from_file(
        cls, file: Path | str, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """Return the template in `file`, in UTF-8. Raises `ModelError` naming it."""
        source, origin = read_source(Path(file))
        return cls(source, special_tokens=special_tokens, origin=origin)

    def for_tools(self, has_tools: object) -> ChatTemplate:
        """Return the template that renders prompts with tools, or the one without."""
        return self.tool_use if has_tools and self.tool_use is not None else self

    def reads(self, name: str) -> bool:
        """Return true if a variable of that name is read anywhere in the template."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def has_role(self, role: str) -> bool:
        """Return true if the template looks for messages of that role, which it then quotes."""
        return re.search(rf"""(["']){re.escape(role)}\1""", self.source) is not None

    def check_read(self, conversation: Conversation) -> None:
        """Raise `InvalidPromptError` for tools or arguments that the template doesn't read."""
        self.for_tools(conversation.tools)._check_read(conversation)

    def _check_read(self, conversation: Conversation) -> None:
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
        """Return the prompt for `messages`, special tokens written out: encode it without adding
        any.

        Raises `InvalidPromptError` for malformed messages, and if the template fails with them or
        refuses them (its `raise_exception`). Raises `RequestFailedError` if it fails with any
        messages. For a `Conversation`, its own `add_generation_prompt` counts.
        """
        checked = self._checked(messages, add_generation_prompt)
        return self.for_tools(checked.tools)._rendered(checked)[0]

    def encode(
        self,
        messages: Conversation | Sequence[Message],
        tokenizer: Tokenizer,
        *,
        special_tokens_in_messages: bool = False,
        max_chars: int | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt for `messages`.

        Special tokens come from the template alone: their names in messages are ordinary text,
        unless `special_tokens_in_messages`.

        Raises as `render` does. Raises `InvalidPromptError` if text of messages would become a
        special token even so, which takes a template that rewrites contents. A rendered text of
        more than `max_chars` characters or `max_tokens` tokens is a `PromptTooLongError`.
        """
        checked = self._checked(messages)
        return self.for_tools(checked.tools)._encode(
            checked, tokenizer, special_tokens_in_messages, max_chars, max_tokens
        )

    def _encode(
        self,
        checked: Conversation,
        tokenizer: Tokenizer,
        special_tokens_in_messages: bool,
        max_chars: int | None,
        max_tokens: int | None,
    ) -> list[int]:
        if special_tokens_in_messages or not (specials := tokenizer.special_tokens).is_needed:
            text, _ = self._rendered(checked)
            _check_chars(len(text), max_chars)
            return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        escaped, escapes = specials.escaped(checked, apart_from=self.source)
        text, escaped = self._rendered(escaped, escapes)
        _check_chars(len(text), max_chars)
        spans = specials.find(text, escapes)

        def written(other: Conversation) -> list[int] | None:
            """Return the special tokens of the prompt with other texts; None if it can't be
            rendered.
            """
            try:
                rendered = self._render(other, escapes)
            except (_FailedError, InvalidPromptError):
                return None  # the template reads in texts, and what it reads means nothing
            return [span.token_id for span in specials.find(rendered, escapes)]

        tokens = [span.token_id for span in spans]
        expected = written(specials.meaningless(escaped))
        if tokens != expected and (
            # The template looks at contents. It may do that, unless it writes special tokens that
            # they dictate.
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
        checked = messages.validated()
        self.for_tools(checked.tools)._roles.check(checked.messages)
        return checked

    def _rendered(
        self, checked: Conversation, escapes: Escapes | None = None
    ) -> tuple[str, Conversation]:
        """Return the prompt, and the conversation in the form that was rendered.

        It is the first of its `carried_forms` that the template takes. If the template takes none,
        all optional fields are written out.
        """
        failed: _FailedError | None = None
        whole = with_all_fields(checked)
        for conversation in (checked, whole) if whole != checked else (checked,):
            for form in forms_of(conversation, self._form):
                tried = shaped(conversation, form)
                try:
                    return self._render(tried, escapes), tried
                except _FailedError as error:
                    failed = _likelier(failed, error)
                    if error.was_stopped:
                        raise self._error(error) from error
        raise self._error(failed or _FailedError("nothing was rendered")) from failed

    @cached_property
    def _form(self) -> Form:
        return preferred_form(self._text_of, reads_tools=self.reads("tools"))

    def _text_of(self, conversation: Conversation) -> str | None:
        """Return the prompt; None if the template doesn't take the conversation."""
        try:
            return self._render(conversation, None)
        except _FailedError:
            return None

    def _error(self, error: _FailedError) -> AioserveError:
        """Return the error of a request: its sender's, or the model's."""
        if error.has_refused:
            return InvalidPromptError(f"the model's chat template refused: {error}")
        if self._works is None:
            self._works = any(self._works_with(conversation) for conversation in _PLAIN)
        if not self._works:
            return RequestFailedError(f"{self._file}: {error}")
        return InvalidPromptError(
            f"the model's chat template {self._file} can't render these messages: {error}",
            argument="messages",
        )

    def _works_with(self, conversation: Conversation) -> bool:
        try:
            self._render(conversation, None)
        except _FailedError as error:
            return error.has_refused
        return True

    def _render(self, checked: Conversation, escapes: Escapes | None) -> str:
        budget = Budget(checked.num_items, checked.num_chars)
        mark = ""
        if checked.continue_final_message:
            checked, mark = _marked(checked)
        messages = checked.messages
        if self._is_harmony:
            messages = with_single_calls(messages)
            if "messages[0]" in self.source:
                messages = with_joined_instructions(messages)
        variables: dict[str, Any] = {
            **self._special_tokens,
            **checked.template_kwargs,
            "messages": [_with_aliases(message) for message in messages],
            "add_generation_prompt": checked.add_generation_prompt,
            "tools": checked.tools,
            "documents": None,
        }
        try:
            text = self._template.render(budget, variables)
        except RefusedError as error:
            refusal = str(error) if escapes is None else escapes.unescape(str(error))
            raise _FailedError(_brief(refusal), has_refused=True) from error
        except BudgetSpentError as error:
            raise _FailedError(f"rendering was stopped: {error}", was_stopped=True) from error
        except Exception as error:
            line = self._template.line_of(error)
            where = "" if line is None else f" (in line {line})"
            why = str(error) if escapes is None else escapes.unescape(str(error))
            raise _FailedError(
                f"rendering failed: {_brief(why or type(error).__name__)}{where}"
            ) from error
        return _cut_at(text, mark) if mark else text


def _likelier(first: _FailedError | None, then: _FailedError) -> _FailedError:
    """Return the failure to report of two forms: a refusal, or else that of the later, fuller
    form.
    """
    return first if first is not None and first.has_refused else then


def _compiled(source: str, origin: str) -> Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(
            f"{origin}: the chat template must have at most {MAX_TEMPLATE_CHARS} characters, "
            f"got {len(source)}"
        )
    try:
        return Template(source)
    except TemplateSyntaxError as error:
        why = f"{_brief(error.message)} (in line {error.lineno})"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = f"it nests too deeply: {_brief(error)}"
    raise ModelError(f"{origin}: the chat template can't be read: {why}")


def _with_aliases(message: dict[str, Any]) -> dict[str, Any]:
    """Add the older name of reasoning, by which some templates (gpt-oss's) read it."""
    if "reasoning_content" not in message:
        return message
    return {"thinking": message["reasoning_content"], **message}


def _marked(conversation: Conversation) -> tuple[Conversation, str]:
    """Return the conversation with a mark at the end of its last content."""
    *before, last = conversation.messages
    mark = f"\ue000{secrets.token_hex(8)}\ue001"
    # A template that trims takes the space away.
    last = last | {"content": f"{last['content']}{mark} "}
    return msgspec.structs.replace(conversation, messages=[*before, last]), mark


def _cut_at(text: str, mark: str) -> str:
    """Return the text before the mark, without what was written after the content."""
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
