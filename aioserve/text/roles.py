"""Tells roles of messages that a chat template knows from those that it would drop or misread.

A template says nothing of roles that it hasn't: it leaves their messages out, or writes them as
another's. So an unknown role is tried beside one that nobody has: where the prompt is the same, the
template doesn't know it. Must not know tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from aioserve.arguments import shown
from aioserve.errors import InvalidPromptError
from aioserve.text.conversation import Conversation

__all__ = ["KNOWN_ROLES", "Roles"]

KNOWN_ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of the OpenAI API: what becomes of them is up to the template."""
LEAST_LIKENESS = 0.75
"""Least likeness of a role to a known one that makes it a misspelling."""
MAX_COMPARED = 64
"""Unknown roles of a conversation that are compared with known ones, some 50 µs each, and that are
tried, which takes a prompt each."""
_QUOTED = re.compile(r"""(?<![\w)\]]\[)(?<!\bget\()(?=(["'])([A-Za-z]{1,64})\1)""")
"""Words that may be roles, and no keys, as in `message["name"]` and `message.get("name")`."""
_NOBODY = ("qxzvkjw", "wvjzkqx")
"""Roles that nobody has, like no other."""


class Roles:
    """Roles that a template knows. `rendered` gives its prompt for a conversation, and None where
    it takes none such. `file` names it in errors. Thread-safe."""

    def __init__(
        self, source: str, rendered: Callable[[Conversation], str | None], file: str
    ) -> None:
        self._named = frozenset([match[2] for match in _QUOTED.finditer(source)])
        self._rendered = rendered
        self._file = file
        self._nobodys: tuple[str | None, str | None] | None = None

    def check(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Raise `InvalidPromptError` for a role that is another misspelt, and for one that the
        template doesn't know. A role of which a template takes no message is left to it."""
        unknown: dict[str, int] = {}
        for index, message in enumerate(messages):
            if message["role"] not in KNOWN_ROLES and message["role"] not in self._named:
                unknown.setdefault(message["role"], index)
        for role, index in islice(unknown.items(), MAX_COMPARED):
            near = get_close_matches(role.strip().lower(), KNOWN_ROLES, 1, LEAST_LIKENESS)
            if near and role.strip().isalpha():
                raise self._error(role, index, f"; did you mean {near[0]}?")
        if not unknown or (nobodys := self._prompt_of_nobody()) is None:
            return
        for place, (role, index) in enumerate(unknown.items()):
            if place == MAX_COMPARED or self._prompt_of(role) == nobodys:
                raise self._error(role, index)

    def _prompt_of_nobody(self) -> str | None:
        """The prompt in which no unknown role shows; None where the template writes any role, or
        refuses those that it doesn't know."""
        if self._nobodys is None:
            one, other = _NOBODY
            self._nobodys = self._prompt_of(one), self._prompt_of(other)
        one, other = self._nobodys
        return one if one == other else None

    def _prompt_of(self, role: str) -> str | None:
        messages = [{"role": "user", "content": "Hello"}, {"role": role, "content": "Hello"}]
        return self._rendered(Conversation(messages))

    def _error(self, role: str, index: int, meant: str = "") -> InvalidPromptError:
        return InvalidPromptError(
            f"messages[{index}]['role'] must be one of {', '.join(KNOWN_ROLES)}, or another that "
            f"the chat template {self._file} knows, got {shown(role)}{meant}",
            argument="messages",
            value=role,
        )
