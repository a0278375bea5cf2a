"""Measures how far the service of one client runs ahead of another's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError

__all__ = ["ServiceGap"]

MAX_PAIRS = 1 << 26
"""Most pairs of clients, of 8 bytes each."""


class ServiceGap:
    """The largest difference in tokens computed for two clients over any span of time in which both
    had a request waiting all the time: what Sheng et al. ("Fairness in Serving LLMs", OSDI 2024)
    bound for backlogged clients.

    A client that waits for nothing gets less because it asks for less, so such times don't count.

    Time and memory are those of the clients that wait at once, in pairs of which one has been
    served since it began to wait. The lead of a client over another is least now while the first is
    served nothing, so that nothing has to be kept of it.
    """

    def __init__(self) -> None:
        self.most: int = 0
        self._columns = _Slots()
        """Clients that wait."""
        self._rows = _Slots()
        """Clients among them that were served something since."""
        self._tokens = np.zeros(1, np.int64)
        """Tokens computed for a client since it began to wait, by column."""
        self._least = np.zeros((1, 1), np.int64)
        """Least lead of one client over the other while both waited, up to the last step that
        served the first, by row and column."""

    def step(
        self, served: Iterable[tuple[str, int]], waiting: Iterable[str], times: int = 1
    ) -> None:
        """Count `steps` steps, each of which computed as many tokens for each client. Those
        `waiting` still wait after them.

        Raises `ConfigError` for more than `MAX_PAIRS` pairs of clients at once.
        """
        waits = frozenset(waiting)
        for client in self._columns.keys() - waits:
            self._columns.give_back(client)
            if client in self._rows:
                self._rows.give_back(client)
        for client in waits - self._columns.keys():
            self._begin_to_wait(client)
        gained = Counter[str]()
        for client, tokens in served:
            if client in waits and tokens:
                gained[client] += tokens
        for client in gained.keys() - self._rows.keys():
            self._be_served(client)
        if not gained:
            return
        self._count(gained)
        if times > 1:
            # A lead that grows is largest after the last of them, one that falls after the first.
            self._tokens[[self._columns[client] for client in gained]] += _array(
                tokens * (times - 2) for tokens in gained.values()
            )
            self._count(gained)

    def _begin_to_wait(self, client: str) -> None:
        column = self._columns.take(client)
        if column == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._grow(axis=1)
        self._tokens[column] = 0
        served = _array(self._columns[client] for client in self._rows)
        self._least[_array(self._rows.values()), column] = self._tokens[served]

    def _be_served(self, client: str) -> None:
        row = self._rows.take(client)
        if row == len(self._least):
            self._grow(axis=0)
        self._least[row] = 0

    def _grow(self, axis: int) -> None:
        if 2 * self._least.size > MAX_PAIRS:
            raise ConfigError(
                f"trace: {len(self._columns)} clients wait at once, and {len(self._rows)} of them "
                f"have been served; the gap is counted between at most {MAX_PAIRS} pairs: give "
                "fewer clients, or a lower rate"
            )
        self._least = np.concatenate((self._least, np.zeros_like(self._least)), axis=axis)

    def _count(self, gained: Counter[str]) -> None:
        """Count what a step computed for clients that have rows. Since they were served last, their
        leads have only fallen, so that they are least right before this step, if not earlier."""
        tokens = self._tokens
        columns = _array(self._columns.values())
        mine = _array(self._columns[client] for client in gained)
        pairs = np.ix_(_array(self._rows[client] for client in gained), columns)
        before = np.subtract.outer(tokens[mine], tokens[columns])
        least = self._least[pairs] = np.minimum(self._least[pairs], before)
        tokens[mine] += _array(gained.values())
        after = np.subtract.outer(tokens[mine], tokens[columns])
        self.most = max(self.most, int((after - least).max()))


class _Slots(dict[str, int]):
    """Numbers of clients that come and go, each as small as is free."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[int] = []

    def take(self, name: str) -> int:
        slot = self[name] = self._free.pop() if self._free else len(self)
        return slot

    def give_back(self, name: str) -> None:
        self._free.append(self.pop(name))


def _array(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)
