"""Roles of messages that a chat template knows, apart from roles that it would drop or misread.

A template doesn't report unknown roles: it leaves their messages out, or writes them as another
role's. So an unknown role is compared with one that nobody has: if the prompt is the same, the
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
"""Roles of the OpenAI API: the template decides what becomes of them."""
LEAST_LIKENESS = 0.75
"""Least likeness to a known role that makes another one a misspelling."""
MAX_COMPARED = 64
"""Most unknown roles of a conversation. Each is compared with known ones, some 50 µs, and tried,
which takes a prompt.
"""
_QUOTED = re.compile(r"""(?<![\w)\]]\[)(?<!\bget\()(?=(["'])([A-Za-z]{1,64})\1)""")
"""Pattern of words that may be roles, and aren't keys as in `message["name"]` and
`message.get("name")`.
"""
_NOBODY = ("qxzvkjw", "wvjzkqx")
"""Roles that nobody has, unlike any other."""


class Roles:
    """Roles that a template knows.

    `rendered` returns its prompt for a conversation, and None if it doesn't take it. `file` names
    it in errors. Thread-safe.
    """

    def __init__(
        self, source: str, rendered: Callable[[Conversation], str | None], file: str
    ) -> None:
        self._named = frozenset([match[2] for match in _QUOTED.finditer(source)])
        self._rendered = rendered
        self._file = file
        self._nobodys: tuple[str | None, str | None] | None = None

    def check(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Raise `InvalidPromptError` for a misspelt role, and for one that the template doesn't
        know.

        A role whose messages the template refuses is left to it.
        """
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
        """Return the prompt that hides unknown roles.

        None if the template writes any role, or refuses unknown ones.
        """
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
