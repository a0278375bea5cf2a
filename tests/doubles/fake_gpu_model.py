"""The arithmetic of `FakeDevice` on a `FakeGpu`, from memory that only its streams write.

A step is packed into 64-bit words, copied to the device, and computed by three kernels there. They
compute the tokens, which may come from slots, the entries kept in the pages, and the samples. So
`expected_tokens` and `expected_logprobs` hold for a runner that brings the right words at the right
time, and for few others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.execution.gpu.device import HostMemory
from aioserve.execution.gpu.failures import HUNG_SECONDS
from aioserve.execution.gpu.graphs import max_sequences
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.step_model import ResultShape
from aioserve.execution.gpu.waiting import HostSide
from aioserve.execution.gpu.worker import CudaWorker
from aioserve.execution.host import Host
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.execution.speculation.resolver import StepFollower
from aioserve.execution.step_arrays import StepArrays
from aioserve.paging.pages import pages_for
from aioserve.request import SamplingParams
from aioserve.steps.plan import MAX_SCORED_TOKENS
from aioserve.testing.fake_device import (
    HIDDEN_SIZE,
    JUNK,
    VOCAB_SIZE,
    entries_of,
    hidden_of,
    logprobs_of,
    token_of,
    weights_of,
)
from aioserve.testing.fake_model import byte_tokenizer
from tests.doubles.fake_gpu import Access, FakeGpu, FakeMemory
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.doubles.simulated_host import SimulatedHost

__all__ = ["FakeGpuModel", "FakeStepModel"]

NO_SLOT = -1
VARIANTS = ("greedy", "drawn")
"""Steps in which no row has a temperature use another kernel."""
FORWARD = "forward"
"""Variant of padded steps whose log-probabilities are wanted: samples come after the graph."""
NAN_STATUS = 1

Words = npt.NDArray[np.int64]


class FakeStepModel:
    """A `StepModel`. The last page and the last slot are for padding.

    There are no logits to change before a draw, and no most likely tokens. Steps that ask for edits
    raise ValueError, and log-probabilities come without alternatives, like those of `FakeDevice`.
    """

    def __init__(
        self,
        gpu: FakeGpu,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        num_host_pages: int = 0,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        """`max_rows` counts the sequences or samples of a step, padding included."""
        self.gpu = gpu
        self.page_size = page_size
        self.num_groups = 1
        largest = ResultShape.largest(max_rows, max_rows, HIDDEN_SIZE)
        self.max_result_bytes: int = largest.num_bytes
        self.table_width: int = pages_for(max_model_len, page_size)
        self.variants: Sequence[Hashable] = VARIANTS
        words = 4 * max_tokens + max_rows * (self.table_width + 7) + 3 * MAX_SCORED_TOKENS + 2
        self.max_input_bytes: int = 8 * words
        self.num_slots = num_slots
        self.num_pages = num_pages
        pages = [np.full(n * page_size, JUNK, np.uint64) for n in (num_pages + 1, num_host_pages)]
        self.kv: FakeMemory = FakeMemory("KV pages", pages[0])
        self.host_kv: FakeMemory = FakeMemory("KV pages of the host", pages[1])
        self.last_tokens: FakeMemory = FakeMemory(
            "last tokens", np.full(num_slots + 1, -1, np.int64)
        )
        self.tokens: FakeMemory = FakeMemory("tokens", np.full(max_tokens, -1, np.int64))
        self.keep: Callable[[Access, Words, npt.NDArray[np.uint64]], None] | None = None
        """Called in each step with the places of its tokens and their kept entries."""
        self.weights: npt.NDArray[np.uint64] = weights_of(2 * max_model_len)

    def pack(self, step: StepArrays, target: HostMemory, padded_to: int | None) -> _Packed:
        batch, samples = step.batch, step.samples
        if batch is None:
            raise ValueError(f"step {step.step} has no batch")
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        padding = 0 if padded_to is None else padded_to - sequences
        if padding < 0:
            raise ValueError(f"step {step.step} has {sequences} sequences, more than {padded_to}")
        pending = np.full(tokens, NO_SLOT, np.int64)
        pending[batch.pending_rows] = batch.pending_slots
        (table,), (locations,) = batch.page_table, batch.token_locations
        width = min(table.shape[1], self.table_width)
        if padded_to is not None:
            width = self.table_width
        page_table = np.full((sequences + padding, width), self.num_pages, np.int64)
        known = min(width, table.shape[1])
        page_table[:sequences, :known] = table[:, :known]
        after = np.arange(tokens, tokens + padding)
        parts = (
            [batch.token_ids, np.zeros(padding, np.int64)],
            [pending, np.full(padding, NO_SLOT)],
            [locations, np.full(padding, self.num_pages * self.page_size)],
            [batch.query_start, after + 1],
            [batch.context_lens, np.ones(padding, np.int64)],
            [page_table.reshape(-1)],
            [batch.logit_rows, after],
            [samples.slots, np.full(padding, self.num_slots)],
            [samples.seeds.view(np.int64), np.zeros(padding, np.int64)],
        )
        logprob_rows, target_ids = _logprobs_wanted(step)
        variant = VARIANTS[int((samples["temperature"] > 0).any())]
        counts = np.array(step.pooled, np.int64)
        wanted = ([logprob_rows], [target_ids], [counts])
        packed = self._packed(target, (*parts, *wanted), width, variant)
        apart = padded_to is not None and len(logprob_rows) > 0
        return msgspec.structs.replace(packed, is_sampled_apart=apart)

    def pack_padding(self, target: HostMemory, padded_to: int, variant: Hashable) -> _Packed:
        """Pack one token at position 0 of the page for padding, for each padded sequence."""
        zeros, after = np.zeros(padded_to, np.int64), np.arange(padded_to)
        parts = (
            [zeros],
            [np.full(padded_to, NO_SLOT)],
            [np.full(padded_to, self.num_pages * self.page_size)],
            [np.arange(padded_to + 1)],
            [np.ones(padded_to, np.int64)],
            [np.full(padded_to * self.table_width, self.num_pages)],
            [after],
            [np.full(padded_to, self.num_slots)],
            [zeros],
            [zeros[:0]],
            [zeros[:0]],
            [zeros[:0]],
        )
        return self._packed(target, parts, self.table_width, str(variant))

    def _packed(
        self,
        target: HostMemory,
        parts: Sequence[Sequence[npt.NDArray[np.integer]]],
        width: int,
        variant: str,
    ) -> _Packed:
        parts = (*parts, [np.array([VARIANTS.index(variant)])])
        joined = [np.concatenate(part).astype(np.int64) for part in parts]
        words = np.concatenate(joined)
        if words.nbytes > len(target.array):
            raise ValueError(f"{words.nbytes} bytes don't fit {len(target.array)}")
        target.array[: words.nbytes] = words.view(np.uint8)
        return _Packed(self, tuple(len(part) for part in joined), width, variant)

    def copy_pages(self, table: HostMemory, num_copies: int) -> None:
        num_bytes = 20 * num_copies
        expected = table.array[:num_bytes].copy()

        def copy(access: Access) -> None:
            if not np.array_equal(table.array[:num_bytes], expected):
                self.gpu.violate("a table of copies was written before they were made")
            copies = table.array[:num_bytes].view(np.int32).reshape(-1, 5)
            for source_cache, source, target_cache, target, count in copies.tolist():
                size = self.page_size
                memories = (self.kv, self.host_kv)
                places = np.arange(source * size, source * size + count)
                entries = np.full(size, JUNK, np.uint64)
                entries[:count] = access.read(memories[source_cache], places)
                places = np.arange(target * size, (target + 1) * size)
                access.write(memories[target_cache], places, entries)

        self.gpu.current_stream.launch("page copies", copy)


class _Packed(msgspec.Struct, frozen=True):
    """Sizes of a packed step, which a graph of it keeps for ever."""

    model: FakeStepModel
    sizes: tuple[int, ...]
    """Words of each part, in the order of `pack`."""
    width: int
    """Width of the page table."""
    draws: str
    is_sampled_apart: bool = False

    @property
    def variant(self) -> str:
        return FORWARD if self.is_sampled_apart else self.draws

    @property
    def num_bytes(self) -> int:
        return 8 * sum(self.sizes)

    @property
    def result_shape(self) -> ResultShape:
        return ResultShape(
            num_rows=self.sizes[7],
            num_logprobs=self.sizes[9],
            num_pooled=self.sizes[11],
            hidden_size=HIDDEN_SIZE,
        )

    def enqueue(self, inputs: FakeMemory, results: FakeMemory) -> None:
        stream = self.model.gpu.current_stream
        stream.launch("tokens", partial(self._fill_in, inputs))
        stream.launch("keys and values", partial(self._write, inputs))
        if not self.is_sampled_apart:
            stream.launch("samples", partial(self._sample, inputs, results))

    def finish(self, inputs: FakeMemory, results: FakeMemory) -> None:
        if self.is_sampled_apart:
            stream = self.model.gpu.current_stream
            stream.launch("samples", partial(self._sample, inputs, results))

    def _words(self, access: Access, inputs: FakeMemory, part: int) -> Words:
        start = 8 * sum(self.sizes[:part])
        return access.read(inputs, slice(start, start + 8 * self.sizes[part])).view(np.int64)

    def _fill_in(self, inputs: FakeMemory, access: Access) -> None:
        ids, pending = self._words(access, inputs, 0), self._words(access, inputs, 1)
        rows = np.flatnonzero(pending != NO_SLOT)
        ids[rows] = access.read(self.model.last_tokens, pending[rows])
        access.write(self.model.tokens, np.arange(len(ids)), ids)

    def _write(self, inputs: FakeMemory, access: Access) -> None:
        """Write sequence by sequence, since one may read what an earlier one writes."""
        model, size = self.model, self.model.page_size
        ids = access.read(model.tokens, np.arange(self.sizes[0]))
        locations = self._words(access, inputs, 2)
        query_start, context_lens = self._words(access, inputs, 3), self._words(access, inputs, 4)
        table = self._words(access, inputs, 5).reshape(-1, self.width)
        for row, context in enumerate(context_lens.tolist()):
            start, end = query_start[row : row + 2].tolist()
            first, before = context - (end - start), 0
            if first:
                index, offset = divmod(first - 1, size)
                place = table[row, index : index + 1] * size + offset
                before = int(access.read(model.kv, place)[0])
            entries = entries_of(ids[start:end], first, before)
            access.write(model.kv, locations[start:end], entries)
            if model.keep is not None:
                model.keep(access, locations[start:end], entries)

    def _sample(self, inputs: FakeMemory, results: FakeMemory, access: Access) -> None:
        model, size = self.model, self.model.page_size
        query_start, context_lens = self._words(access, inputs, 3), self._words(access, inputs, 4)
        table = self._words(access, inputs, 5).reshape(-1, self.width)
        logit_rows, slots = self._words(access, inputs, 6), self._words(access, inputs, 7)
        seeds = self._words(access, inputs, 8).view(np.uint64)
        logprob_rows = self._words(access, inputs, 9)
        target_ids = self._words(access, inputs, 10)
        pooled_counts = self._words(access, inputs, 11)
        (variant,) = self._words(access, inputs, 12).tolist()
        if VARIANTS[variant] != self.draws:
            model.gpu.violate(f"a kernel for {self.draws} steps samples for another")
        shape = self.result_shape
        token_ids = np.zeros(shape.num_rows, np.int64)
        statuses = np.zeros(shape.num_rows, np.int32)
        if access.fault is GpuFault.BAD_ROW and shape.num_rows:
            statuses[access.source.randrange(shape.num_rows)] = NAN_STATUS
        sequences = np.searchsorted(query_start, logit_rows, side="right") - 1
        totals: list[int] = []
        last_positions: list[int] = []
        for row, sequence in enumerate(sequences.tolist()):
            after = int(query_start[sequence + 1] - logit_rows[row]) - 1
            end = int(context_lens[sequence]) - after
            positions = np.arange(end)
            places = table[sequence, positions // size] * size + positions % size
            entries = access.read(model.kv, places)
            totals.append(int(np.dot(entries, model.weights[:end])))
            last_positions.append(end - 1)
        for row in np.flatnonzero(statuses == 0).tolist():
            token_ids[row] = token_of(totals[row], int(seeds[row]))
        sampled = logprob_rows[: len(logprob_rows) - len(target_ids)]
        told = np.concatenate((token_ids[sampled], target_ids)).tolist()
        logprobs = np.array(
            [
                logprobs_of(totals[row], token_id).logprob
                for row, token_id in zip(logprob_rows.tolist(), told, strict=True)
            ],
            np.float32,
        )
        first_pooled = len(totals) - int(pooled_counts.sum())
        states = [hidden_of(*row) for row in zip(totals, last_positions, strict=True)]
        parts = np.split(
            np.array(states[first_pooled:], np.float32).reshape(-1, HIDDEN_SIZE),
            np.cumsum(pooled_counts)[:-1],
        )
        sums = [part.sum(axis=0) for part in parts[: len(pooled_counts)]]
        pooled = np.array(sums, np.float32).reshape(-1)
        access.write(model.last_tokens, slots, token_ids)
        access.write(results, shape.token_ids, token_ids.view(np.uint8))
        access.write(results, shape.statuses, statuses.view(np.uint8))
        access.write(results, shape.logprobs, logprobs.view(np.uint8))
        access.write(results, shape.pooled, pooled.view(np.uint8))


def _logprobs_wanted(step: StepArrays) -> tuple[Words, Words]:
    """Wanted rows of logits, and the tokens after the last of these. Raises ValueError for a step
    that would change logits."""
    extras = step.extras
    if extras is not None and extras.edits is not None:
        raise ValueError(
            f"step {step.step} has rows with penalties, logit_bias, bad_words, min_tokens or "
            "allowed_token_ids, and a fake GPU has no logits to change"
        )
    if extras is None or extras.logprobs is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.array(extras.logprobs.rows, np.int64), extras.logprobs.target_ids


class FakeGpuModel:
    """Give it to `Engine(model=...)` on a simulated loop: a `CudaRunner` on a `FakeGpu`."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 256,
        seed: int = 0,
        faults: GpuFaults = GpuFaults(),  # noqa: B008
        op_seconds: float | Callable[[str], float] = 0.002,
        graph_sizes: Sequence[int] = (),
        capture_at_start: bool = False,
        hung_seconds: float = HUNG_SECONDS,
        drafts: Callable[[FakeStepModel, int], StepFollower] | None = None,
    ) -> None:
        """`drafts` makes a follower of the model's steps, for batches of at most the given number
        of tokens."""
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.graph_sizes: tuple[int, ...] = tuple(graph_sizes)
        self.capture_at_start = capture_at_start
        self.hung_seconds = hung_seconds
        self.captured: list[tuple[int, int]] = []
        """Reports about the capturing of graphs at the start."""
        self._drafts = drafts
        self._make_gpu = partial(FakeGpu, seed=seed, faults=faults, op_seconds=op_seconds)
        self.gpu: FakeGpu | None = None

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """Load as an engine calls it. The engine's `num_pages` and `max_model_len` take
        precedence."""
        num_pages = config.num_pages or self.num_pages
        max_model_len = min(
            config.max_model_len or self.max_model_len, num_pages * config.page_size
        )
        self.gpu = self._make_gpu()
        model = FakeStepModel(
            self.gpu,
            num_pages=num_pages,
            page_size=config.page_size,
            num_slots=num_slots,
            num_host_pages=config.num_host_pages,
            max_tokens=max(config.max_num_batched_tokens, *self.graph_sizes, config.max_num_seqs),
            max_rows=max(num_slots, *self.graph_sizes, max_sequences(config)),
            max_model_len=max_model_len,
        )
        host_side: HostSide = SimulatedHost(self.gpu)
        runner = CudaRunner(
            Host(config.page_size, num_slots, model.num_groups),
            CudaWorker(self.gpu, model, self.graph_sizes),
            name="fake",
            host_side=host_side,
            hung_seconds=self.hung_seconds,
            follower=self._drafts and self._drafts(model, config.max_num_batched_tokens),
        )
        if self.capture_at_start:
            try:
                await runner.capture_graphs(lambda done, total: self.captured.append((done, total)))
            except BaseException:
                await runner.aclose()
                raise
        return LoadedModel(
            name="fake",
            runner=runner,
            limits=ModelLimits(
                vocab_size=VOCAB_SIZE,
                max_model_len=max_model_len,
                num_pages=num_pages,
                eos_token_ids=frozenset(),
            ),
            defaults=SamplingParams(temperature=0.0),
            tokenizer=byte_tokenizer(),
            chat_template=None,
            description={"architecture": "fake"},
            take_drafter=runner.take_drafter,
        )
