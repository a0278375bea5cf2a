"""Draft models and heads beside a `FakeStepModel`, which predict its draws if their pages are in
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from aioserve import DrafterSpec, hookimpl
from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.execution.speculation.drafting import DrafterInMemory
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter, DraftOptions
from aioserve.execution.speculation.drafts.draft_head import DraftHead
from aioserve.execution.speculation.drafts.draft_model import DraftModel
from aioserve.steps.pages import PageCopy
from aioserve.testing.fake_device import JUNK
from tests.doubles.draft_decoder import DraftDecoder, TokenPages
from tests.doubles.draft_head import EntryPages, HeadOfEntries
from tests.doubles.fake_gpu import Access, FakeGpu, FakeMemory
from tests.doubles.fake_gpu_model import FakeStepModel

__all__ = ["FakeStatePages", "ModelPlugin", "head_beside", "model_beside"]


class FakeStatePages:
    """`StatePages` whose copies are work of the current stream."""

    def __init__(self, gpu: FakeGpu, num_pages: int, num_host_pages: int, page_size: int) -> None:
        self._gpu = gpu
        self.page_size = page_size
        sizes = (num_pages * page_size, num_host_pages * page_size)
        self.memories = [FakeMemory("states", np.full(size, JUNK, np.uint64)) for size in sizes]
        self._left: list[Callable[[], None]] = []
        """Copies that no stream has made yet."""

    def put(self, access: Access, places: Any, states: npt.NDArray[np.uint64]) -> None:
        """Put states into places, in a kernel."""
        access.write(self.memories[0], places, states)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            make = partial(self._copy, copy)
            made = partial(self._made, make, copy)
            self._gpu.current_stream.launch("a copy of states", made)
            self._left.append(make)

    def _made(self, make: Callable[[], None], copy: PageCopy, access: Access) -> None:
        if make in self._left:
            self._left.remove(make)
            make()
        source, target = self._memories(copy)
        access.read(source, self._places(copy.source)[: copy.num_tokens])
        # Even a copy made ahead of its turn keeps its order with others.
        places = self._places(copy.target)
        access.write(target, places, target.array[places])

    def _copy(self, copy: PageCopy) -> None:
        source, target = self._memories(copy)
        rows = np.full(self.page_size, JUNK, np.uint64)
        rows[: copy.num_tokens] = source.array[self._places(copy.source)[: copy.num_tokens]]
        target.array[self._places(copy.target)] = rows

    def _memories(self, copy: PageCopy) -> tuple[FakeMemory, FakeMemory]:
        return self.memories[copy.from_tier], self.memories[copy.to_tier]

    def _places(self, page: int) -> npt.NDArray[np.int64]:
        return np.arange(page * self.page_size, (page + 1) * self.page_size)

    def at(self, locations: npt.NDArray[np.int64]) -> torch.Tensor:
        """Make the copies that are left. Only copies of the same step can be on the stream before
        this."""
        while self._left:
            self._left.pop(0)()
        states = self.memories[0].array[locations].view(np.int64)
        return torch.from_numpy(states)[:, None]


def _options(model: FakeStepModel, most_tokens: int) -> DraftOptions:
    return DraftOptions(
        num_slots=model.num_slots,
        num_groups=1,
        max_model_len=model.table_width * model.page_size,
        max_sequences=model.num_slots,
        max_draft_tokens=most_tokens,
        most_tokens=most_tokens,
    )


def model_beside(decoder: DraftDecoder, model: FakeStepModel, most_tokens: int) -> DraftModel:
    pages = TokenPages(model.num_pages, model.page_size)
    return DraftModel(cast(Any, decoder), cast(Any, pages), _options(model, most_tokens))


def head_beside(head: HeadOfEntries, model: FakeStepModel, most_tokens: int) -> DraftHead:
    """Make a head that reads the entries that steps of the model keep of their tokens."""
    size, num_host_pages = model.page_size, len(model.host_kv.array) // model.page_size
    states = FakeStatePages(model.gpu, model.num_pages + 1, num_host_pages, size)
    model.keep = states.put
    return DraftHead(
        cast(Any, head),
        cast(Any, head),
        cast(Any, EntryPages(model.num_pages, size)),
        cast(Any, states),
        _options(model, most_tokens),
    )


class ModelPlugin:
    """Offers the drafter `beside`, which `make` makes for a `FakeGpuModel` with this plugin as its
    `drafts`."""

    def __init__(self, make: Callable[[FakeStepModel, int], ComputedDrafter]) -> None:
        self._make = make
        self.made: Drafter | None = None

    def __call__(self, model: FakeStepModel, most_tokens: int) -> ComputedDrafter:
        made = self._make(model, most_tokens)
        self.made = DrafterInMemory(made, model.gpu)
        return made

    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("beside", lambda: _Beside(self))]


class _Beside(AtOnce):
    def __init__(self, plugin: ModelPlugin) -> None:
        self._plugin = plugin

    @property
    def _made(self) -> Drafter:
        assert self._plugin.made is not None
        return self._plugin.made

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._made.start(slot, sequence)

    def end(self, slot: int) -> None:
        self._made.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._made.extend_all(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._made.draft_all(slots, limits)
