"""Small models of five mistakes in the books' printed code, for tests to hold beside ours.

Each class does what the printed one does in the one respect that its test is about.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PrintedBatcher", "PrintedCache", "PrintedPool", "PrintedRotation"]


class PrintedPool:
    """Pages for so many tokens: one for `page_size` of them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = set(range(num_pages))

    def allocate(self, num_tokens: int) -> list[int]:
        pages = sorted(self.free_pages)[: -(-num_tokens // self.page_size)]
        self.free_pages -= set(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes them back, whoever else names them."""
        self.free_pages |= set(pages)


class PrintedCache:
    """A tree with a token and a page for each node, as a dict from prefixes to pages."""

    def __init__(self, pool: PrintedPool) -> None:
        self.pool = pool
        self.page_of: dict[tuple[int, ...], int | None] = {}

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens for which there is a node, with a page or without."""
        ends = range(1, len(tokens) + 1)
        return next(
            (end - 1 for end in ends if tuple(tokens[:end]) not in self.page_of), len(tokens)
        )

    def pages(self, tokens: Sequence[int]) -> list[int | None]:
        return [self.page_of[tuple(tokens[:end])] for end in range(1, self.match(tokens) + 1)]

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Wants as many pages as tokens."""
        if len(tokens) != len(pages):
            raise ValueError("a page for each token")
        for end, page in enumerate(pages, start=1):
            self.page_of.setdefault(tuple(tokens[:end]), page)

    def evict(self, count: int) -> None:
        """Takes the pages of nodes, and leaves the nodes."""
        held = [prefix for prefix, page in self.page_of.items() if page is not None]
        for prefix in held[:count]:
            page = self.page_of[prefix]
            assert page is not None
            self.pool.free([page])
            self.page_of[prefix] = None


class PrintedBatcher:
    """Draws a token behind each chunk, the last of a prompt or not."""

    def __init__(self, prompt_tokens: int, chunk_tokens: int) -> None:
        self.left = prompt_tokens
        self.chunk_tokens = chunk_tokens
        self.drawn = 0

    def step(self) -> None:
        self.left -= min(self.left, self.chunk_tokens)
        self.drawn += 1


class PrintedRotation:
    """Chooses chunks within a budget, and then batches all that is left behind each chunk."""

    def __init__(self, prompts: Sequence[int], chunk_tokens: int, budget_tokens: int) -> None:
        self.prompts = list(prompts)
        self.done = [0] * len(prompts)
        self.chunk_tokens = chunk_tokens
        self.budget_tokens = budget_tokens

    def step(self) -> int:
        """Tokens of the batch."""
        left, chosen = self.budget_tokens, []
        for number, prompt in enumerate(self.prompts):
            chunk = min(self.chunk_tokens, prompt - self.done[number])
            if 0 < chunk <= left:
                left -= chunk
                self.done[number] += chunk
                chosen.append(number)
        return sum(self.prompts[number] - self.done[number] for number in chosen)
