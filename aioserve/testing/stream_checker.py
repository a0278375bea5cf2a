"""Reader of an engine's streams, with a `FakeModel`, that records breaches of their contract."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from aioserve.engine.engine import Engine
from aioserve.engine.stream import TokenStream
from aioserve.errors import AioserveError, StepError
from aioserve.request import FinishReason, Logprobs, SamplingParams
from aioserve.testing.fake_device import expected_logprobs, expected_tokens
from aioserve.testing.fake_model import PlantedError

__all__ = ["StreamChecker"]

BY_ITSELF = (FinishReason.LENGTH, FinishReason.STOP)


class StreamChecker:
    """Checker of the contract of streams.

    Tokens are those of `expected_tokens`, in order, with the log-probabilities of
    `expected_logprobs` if these are asked for. Then comes exactly one end, and nothing after it.
    Steps fail only if that was planted. If the contract was broken, `check` raises AssertionError.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ends: Counter[str] = Counter()
        """Ends of requests: a finish reason, the name of an error, "left" or "cancelled"."""
        self.wrong_tokens: list[str] = []
        """Requests with wrong tokens, or log-probabilities."""
        self.wrong_ends: list[str] = []
        """Requests with no end, with two, or with tokens after it."""
        self.failed_steps: list[str] = []
        """Errors of steps that nobody planted, such as plans that the fake device refuses."""
        self.num_open: int = 0
        """Requests whose readers haven't come to an end."""

    def check(self) -> None:
        """Raise unless every request read so far had the right tokens and one end."""
        problems = [*self.wrong_tokens, *self.wrong_ends, *self.failed_steps]
        if self.num_open:
            problems.append(f"{self.num_open} requests have no end")
        if problems:
            raise AssertionError(f"{len(problems)} faults: " + "; ".join(problems[:8]))

    async def read(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        leave_after: int | None = None,
        pause_seconds: Callable[[int], float] = lambda num_tokens: 0.0,
        request_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> str:
        """Submit a request, read it to its end, or until `leave_after` tokens came, and return how
        it ended.

        The reader sleeps for `pause_seconds(n)` after the n-th token. `params` must have a seed.
        """
        try:
            stream = self.engine.stream(
                prompt, params, request_id=request_id, deadline_seconds=deadline_seconds
            )
        except AioserveError as error:
            return self._ended(type(error).__name__)
        answers: list[list[int]] = [[] for _ in range(params.n)]
        logprobs: list[list[Logprobs | None]] = [[] for _ in range(params.n)]
        self.num_open += 1
        end = "left"
        num_tokens = 0
        try:
            while leave_after is None or num_tokens < leave_after:
                token = await anext(stream, None)
                if token is None:
                    end = stream.finish_reason or "no end"
                    break
                answers[token.sample].append(token.id)
                logprobs[token.sample].append(token.logprobs)
                num_tokens += 1
                if token.index != len(answers[token.sample]) - 1:
                    self.wrong_tokens.append(f"{stream!r}: {token} is out of order")
                if seconds := pause_seconds(num_tokens):
                    await asyncio.sleep(seconds)
        except AioserveError as error:
            end = type(error).__name__
            if isinstance(error, StepError) and not isinstance(error.__cause__, PlantedError):
                self.failed_steps.append(f"{stream!r}: {error}")
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        finally:
            # Before anything is awaited: the reader may be cancelled.
            stream.close()
            self.num_open -= 1
            self._ended(end)
            self._check_tokens(stream, end, prompt, params, answers)
            self._check_logprobs(stream, prompt, params, answers, logprobs)
            self._check_end(stream, end)
        return end

    def _ended(self, how: str) -> str:
        self.ends[how] += 1
        return how

    def _check_tokens(
        self,
        stream: TokenStream,
        end: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        answers: list[list[int]],
    ) -> None:
        prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        most = self.engine.limits.max_model_len - len(prompt_ids)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self.engine.limits.eos_token_ids
        for sample, answer in enumerate(answers):
            seed = ((params.seed or 0) + sample) % 2**64
            if answer != expected_tokens(prompt_ids, len(answer), seed):
                self.wrong_tokens.append(f"{stream!r}: sample {sample} has wrong tokens")
            if any(token_id in ends for token_id in answer[:-1]):
                self.wrong_tokens.append(f"{stream!r}: sample {sample} goes on after its end")
            whole = end in BY_ITSELF and stream.finish_reasons[sample] is FinishReason.LENGTH
            if len(answer) > most or (whole and len(answer) < most):
                self.wrong_tokens.append(
                    f"{stream!r}: sample {sample} has {len(answer)} of {most} tokens"
                )

    def _check_logprobs(
        self,
        stream: TokenStream,
        prompt: str | Sequence[int],
        params: SamplingParams,
        answers: list[list[int]],
        logprobs: list[list[Logprobs | None]],
    ) -> None:
        prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        for sample, (answer, found) in enumerate(zip(answers, logprobs, strict=True)):
            expected: list[Logprobs | None] = [None] * len(answer)
            if params.logprobs is not None:
                expected = [*expected_logprobs([*prompt_ids, *answer], len(prompt_ids))]
            if found != expected:
                self.wrong_tokens.append(f"{stream!r}: sample {sample} has wrong logprobs")
        scored: tuple[Logprobs | None, ...] = ()
        if params.prompt_logprobs is not None:
            scored = (None, *expected_logprobs(prompt_ids))
        if any(answers) and stream.prompt_logprobs != scored:
            self.wrong_tokens.append(f"{stream!r} has wrong prompt_logprobs")

    def _check_end(self, stream: TokenStream, end: str) -> None:
        """Check what comes after the end, read without awaiting: nothing may be left to wait
        for.
        """
        if stream.finish_reason is None or None in stream.finish_reasons:
            self.wrong_ends.append(f"{stream!r} ended as {end!r} and goes on")
            return
        further = [_read_on(stream) for _ in range(3)]
        # An error stays. A reader that left may find the error that had ended its request before.
        if end in ("left", "cancelled"):
            ends = ("end", "error")
        else:
            ends = ("end" if isinstance(end, FinishReason) else "error",)
        if further[0] not in ends or len(set(further)) > 1:
            self.wrong_ends.append(f"{stream!r} ended as {end!r} and then came {further}")


def _read_on(stream: TokenStream) -> str:
    reading = stream.__anext__()
    try:
        reading.send(None)
    except StopIteration:
        return "token"
    except StopAsyncIteration:
        return "end"
    except AioserveError:
        return "error"
    reading.close()
    return "nothing"
