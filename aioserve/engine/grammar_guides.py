"""Guides constrained completions, off the event loop.

    a token is known ──► on a thread: accept it, take forced tokens, make a mask ──► the step that
                                                                                     draws the next

That step runs meanwhile: its masks come during its forward pass (`aioserve.sampling.masks`). All
completions of one step are handled in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial

import numpy as np

from aioserve.engine.constrained import ConstrainedCompletion, Guide
from aioserve.engine.requests import LiveSample
from aioserve.errors import InvalidSamplingError, RequestFailedError
from aioserve.execution.step_thread import StepThread
from aioserve.grammars.matcher import Grammar, Matcher
from aioserve.sampling.masks import LateMasks

__all__ = ["GrammarGuides"]

MAX_JUMP = 64
"""Most forced tokens taken at once. They reach the reader's bounded mailbox together. The next
token is drawn, and as many forced ones may follow it."""


class LookAhead(Enum):
    """Treatment of tokens that a grammar forces."""

    NO = 0
    """Draw them one by one, like any others."""
    DRAWN = 1
    """Draw several in one step. The grammar leaves no other choice for any of them."""
    TAKEN = 2
    """Take them without a draw."""


class GrammarGuides:
    """Guides the constrained completions of one engine, on the event loop that it is made on.

    `tell` is called on that loop. The grammar thread starts with the first constrained completion.
    Large grammars have a thread of their own: a completion may need its grammar compiled anew,
    which takes up to some seconds.
    """

    def __init__(
        self, name: str, tell: Callable[[LiveSample, Guide], None], *, jump_forward: bool
    ) -> None:
        self._name = name
        self._tell = tell
        self._jump_forward = jump_forward
        self.is_used: bool = False
        """True once there has been a constrained completion."""
        self._threads: dict[bool, StepThread[list[Guide]]] = {}
        """Grammar threads. Key True: the thread for large grammars."""
        self._asked: dict[LiveSample, list[int]] = {}
        """New tokens of each sample for the next `ask`."""
        self._running: dict[bool, asyncio.Future[list[Guide]]] = {}
        """Last call on each thread."""
        self._launched: dict[int, LateMasks] = {}
        """Masks of steps in flight, by step."""
        self._expecting: set[LiveSample] = set()
        """Completions that launched steps sample from, until they are known to have ended."""

    def begin(self, sample: LiveSample, grammar: Grammar) -> None:
        """Begin a new completion. Raises `RuntimeError` if the system can't start a thread."""
        request = sample.request.request
        if request is None:
            return
        sample.constrained = ConstrainedCompletion(request.prompt_tokens, grammar.is_large)
        begin = partial(_begin, sample, grammar, request.end_ids, request.begun_ids.tolist())
        self._call(grammar.is_large, {sample: 0}, begin)

    def note(self, sample: LiveSample, token_id: int) -> None:
        """Note a token sampled for a completion that goes on.

        `ask` later passes it to the matcher, unless it was forced: the matcher has taken forced
        ones.
        """
        constrained = sample.constrained
        left = -1 if constrained is None else constrained.num_forced_behind(sample.num_delivered)
        if left < 0:
            self._asked.setdefault(sample, []).append(token_id)
        elif left == 0 and constrained is not None and constrained.error_behind is not None:
            self._tell(sample, Guide((), None, constrained.error_behind))

    def ask(self) -> None:
        every, self._asked = self._asked, {}
        on_threads: dict[bool, dict[LiveSample, list[int]]] = {}
        for sample, ids in every.items():
            on_threads.setdefault(_is_large(sample), {})[sample] = ids
        for is_large, asked in on_threads.items():
            steps = [(s.matcher, ids, self._look_of(s)) for s, ids in asked.items()]
            new = {s: len(ids) for s, ids in asked.items()}
            self._call(is_large, new, partial(_advance, steps))

    @property
    def is_busy(self) -> bool:
        """True while an answer from a grammar thread is due."""
        return any(not running.done() for running in self._running.values())

    def expect(self, step: int, rows: Sequence[tuple[int, LiveSample | None, int]]) -> LateMasks:
        """Prepare the masks of a step that is about to be launched.

        `rows` has the index of each masked row, its completion, and the position of the token it
        samples.
        """
        masks = self._launched[step] = LateMasks([row for row, *_ in rows])
        behind: dict[int, tuple[Guide, int]] = {}
        samples = {row: sample for row, sample, _ in rows}
        masks.ask = partial(self._ask_behind, masks, samples, behind)
        for row, sample, position in rows:
            if sample is None or sample.constrained is None:
                masks.bring(row, None)
            else:
                self._expecting.add(sample)
                sample.constrained.expect(position, masks, row)
                if (found := sample.constrained.drawn_behind(position)) is not None:
                    behind[row] = found
        return masks

    def let_go(self, step: int, rows: Iterable[int]) -> None:
        """Let a step in flight wait no longer for masks of `rows`.

        The tokens of these rows will be dropped, because the tokens before them are never drawn.
        """
        if (masks := self._launched.get(step)) is not None:
            for row in rows:
                masks.bring(row, None)

    def release(self, step: int, live: Container[int]) -> None:
        """Forget a finished step. Completions outside the `live` sequences have ended: no step
        waits for them any longer."""
        self._launched.pop(step, None)
        for sample in [s for s in self._expecting if s.sequence_id not in live]:
            self._expecting.discard(sample)
            if sample.constrained is not None:
                sample.constrained.ended()

    async def aclose(self) -> None:
        for thread in self._threads.values():
            await thread.aclose()

    def _look_of(self, sample: LiveSample) -> LookAhead:
        """Choose how to treat forced tokens.

        They may skip the draw if their logits aren't wanted, only the grammar restricts them, and
        later draws need just their KV. Logits processors may count on one call a token, step by
        step.
        """
        request = sample.request.request
        if not self._jump_forward or request is None or request.params.logits_processors:
            return LookAhead.NO
        if request.params.logprobs is None and not request.params.edits_logits:
            return LookAhead.TAKEN
        return LookAhead.DRAWN

    def _ask_behind(
        self,
        masks: LateMasks,
        samples: Mapping[int, LiveSample | None],
        behind: Mapping[int, tuple[Guide, int]],
        row: int,
        draft_tokens: Sequence[int],
    ) -> None:
        """Ask for the masks behind the draft tokens of `row`. Runs on the step thread.

        Behind a forced token come forced ones, whose masks are known. Otherwise ask the matcher: it
        has taken all known tokens of the completion, and no more come before the step is done.
        """
        sample, count = samples[row], len(draft_tokens)
        if (found := behind.get(row)) is not None:
            guide, place = found
            known = [guide.mask_at(place + 1 + n) for n in range(count)]
            masks.bring_behind(row, count, [mask for mask in known if mask is not None])
            return
        thread = None if sample is None else self._threads.get(_is_large(sample))
        if thread is None or sample is None or sample.matcher is None:
            masks.bring_behind(row, count, ())
        else:
            thread.post(partial(_bring_behind, masks, row, sample.matcher, draft_tokens))

    def _call(
        self, is_large: bool, samples: Mapping[LiveSample, int], call: Callable[[], list[Guide]]
    ) -> None:
        """Run `call` on a grammar thread. `samples` has the number of new tokens of each."""
        if (thread := self._threads.get(is_large)) is None:
            kind = "large-grammar" if is_large else "grammar"
            thread = self._threads[is_large] = StepThread(f"aioserve-{kind}-{self._name}")
            self.is_used = True
        running = self._running[is_large] = asyncio.ensure_future(thread.submit(call))
        running.add_done_callback(partial(self._done, samples))

    def _done(self, samples: Mapping[LiveSample, int], future: asyncio.Future[list[Guide]]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            guides = future.result()
        else:
            failed = RequestFailedError("structured_output can't be followed")
            guides = [Guide((), None, failed.with_cause(error))] * len(samples)
        for (sample, num_tokens), guide in zip(samples.items(), guides, strict=True):
            self._tell(sample, guide)  # before a step can bring what follows from it
            if sample.constrained is not None:
                sample.constrained.add_guide(guide, num_tokens)


def _is_large(sample: LiveSample) -> bool:
    return sample.constrained is not None and sample.constrained.is_large


def _begin(
    sample: LiveSample, grammar: Grammar, end_ids: frozenset[int], begun_ids: Sequence[int]
) -> list[Guide]:
    """Tell of the first token behind those that the completion was begun with. It is sampled,
    whatever it must be."""
    sample.matcher = matcher = grammar.matcher(end_ids)
    for place, token_id in enumerate(begun_ids, 1):
        if not matcher.accept(token_id):
            if matcher.error is not None:
                return [Guide((), None, _not_further(matcher.error))]
            error = InvalidSamplingError(
                f"{matcher.argument} doesn't allow token {token_id} at place {place} of the "
                "completion that is forked",
                argument=matcher.argument,
            )
            return [Guide((), None, error)]
    return [_next(matcher, LookAhead.NO)]


def _bring_behind(
    masks: LateMasks, row: int, matcher: Matcher, draft_tokens: Sequence[int]
) -> None:
    try:
        found = matcher.behind(draft_tokens)
    except BaseException:  # only the draft tokens fail; an error in a real token ends it
        found = []
    masks.bring_behind(row, len(draft_tokens), found)


def _advance(steps: Sequence[tuple[Matcher | None, Sequence[int], LookAhead]]) -> list[Guide]:
    return [_after(*step) for step in steps]


def _after(matcher: Matcher | None, token_ids: Sequence[int], look: LookAhead) -> Guide:
    """Accept tokens and return the guide for what follows. An error ends this completion alone."""
    token_id = token_ids[0]
    try:
        for token_id in token_ids:
            if matcher is None or not matcher.accept(token_id):
                break
        else:
            if matcher is not None:
                return _next(matcher, look)
    except BaseException as error:  # a panic in Rust code is a BaseException
        failed = RequestFailedError("structured_output can't be followed")
        return Guide((), None, failed.with_cause(error))
    if matcher is not None and matcher.error is not None:
        return Guide((), None, _not_further(matcher.error))
    argument = "structured_output" if matcher is None else matcher.argument
    return Guide(
        (),
        None,
        InvalidSamplingError(
            f"{argument} doesn't allow token {token_id}, which was drawn: other parameters leave "
            "no token that it does",
            argument=argument,
        ),
    )


def _not_further(why: str) -> InvalidSamplingError:
    """The grammar itself has no way on, or hit its limits: another grammar would help."""
    return InvalidSamplingError(
        f"structured_output can't be followed further: {why}", argument="structured_output"
    )


def _next(matcher: Matcher, look: LookAhead) -> Guide:
    """Take forced tokens and make the next guide. Runs on the thread that owns the matcher."""
    taken: list[int] = []
    looks = look is not LookAhead.NO
    while looks and (forced := matcher.forced(MAX_JUMP - len(taken))):
        matcher.accept_all(forced)
        taken += forced
    drawn = look is LookAhead.DRAWN and bool(taken)
    if matcher.has_ended:
        return Guide(tuple(taken), np.zeros_like(matcher.allowed()) if drawn else None, drawn=drawn)
    mask = matcher.allowed()
    if mask.any():
        return Guide(tuple(taken), mask, drawn=drawn)
    why = _not_further(matcher.error or "nothing that the tokenizer can write goes on")
    if drawn:
        return Guide(tuple(taken), mask, drawn=True, error_behind=why)
    return Guide(tuple(taken), None, why)
