"""How far the service of one client runs ahead of another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["ServiceGap"]


class ServiceGap:
    """The largest difference in tokens computed for two clients over any span of time in which both
    had a request waiting all the time: what Sheng et al. ("Fairness in Serving LLMs", OSDI 2024)
    bound for backlogged clients.

    A client that waits for nothing gets less because it asks for less, so such times don't count.
    """

    def __init__(self, clients: Sequence[str]) -> None:
        self.most = 0
        self._index = {client: index for index, client in enumerate(clients)}
        self._served = np.zeros(len(clients), np.int64)
        pairs = (len(clients), len(clients))
        # Of every pair, since both wait: the least and the most lead of the first.
        self._least = np.zeros(pairs, np.int64)
        self._most = np.zeros(pairs, np.int64)
        self._waited = np.zeros(pairs, np.bool_)

    def step(self, served: Iterable[tuple[str, int]], waiting: Iterable[str]) -> None:
        """One step computed so many tokens for each client; those `waiting` still wait after it."""
        waits = np.zeros(len(self._served), np.bool_)
        waits[[self._index[client] for client in waiting]] = True
        both = np.logical_and.outer(waits, waits)
        lead = np.subtract.outer(self._served, self._served)
        for client, tokens in served:
            self._served[self._index[client]] += tokens
        if not both.any():
            self._waited = both
            return
        begins = both & ~self._waited
        self._least[begins] = self._most[begins] = lead[begins]
        lead = np.subtract.outer(self._served, self._served)
        np.minimum(self._least, lead, out=self._least)
        np.maximum(self._most, lead, out=self._most)
        self.most = max(self.most, int((self._most - self._least)[both].max()))
        self._waited = both
