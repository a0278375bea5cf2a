"""Models of drafters that search all of the text each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ModelAnswers", "ModelSequence", "ngram_draft", "suffix_draft"]

START, END = -2, -1
PREDICTION_DEPTH = 64


@dataclass
class ModelSequence:
    prompt: list[int]
    answer: list[int]
    namespace: bytes
    predicted: list[int]

    @property
    def known(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def marked(self) -> list[int]:
        return [START, *self.answer]


@dataclass
class Windows:
    """Positions that are counted, each for the `depth` tokens that begin there."""

    text: list[int]
    starts: list[int]
    depth: int

    def behind(self, run: list[int]) -> list[int]:
        """Starts of the windows that begin with `run`, which is no longer than they are."""
        return [s for s in self.starts if self.text[s : s + len(run)] == run]

    def draft(self, run: list[int], most: int, least: float) -> tuple[list[int], float, int]:
        """Draft tokens, the expected number of right ones, and the number of occurrences of
        `run`."""
        starts = self.behind(run)
        count = len(starts)
        tokens: list[int] = []
        probability, expected = 1.0, 0.0
        for length in range(len(run), len(run) + most):
            following = {s: ([*self.text, *tokens])[s + length] for s in starts}
            if length >= self.depth:
                starts = starts[-1:]
                token = following[starts[0]]
            else:
                counts = Counter(following.values())
                token = max(
                    counts, key=lambda t: (counts[t], max(s for s in starts if following[s] == t))
                )
                probability *= counts[token] / len(starts)
                if probability < least:
                    break
                starts = [s for s in starts if following[s] == token]
            if token < 0:
                break
            tokens.append(token)
            expected += probability
        return tokens, expected, count


def known_windows(known: list[int], depth: int) -> tuple[Windows, int]:
    """Windows of a growing sequence, and the number of last tokens that occurred before. No window
    that begins in these is counted yet."""
    end = len(known)
    for length in range(min(depth - 1, end), 0, -1):
        run = known[end - length :]
        if any(known[s : s + length] == run for s in range(end - length)):
            return Windows(known, list(range(end - length)), depth), length
    return Windows(known, list(range(end)), depth), 0


def ended_windows(answers: Sequence[list[int]], depth: int) -> Windows:
    text: list[int] = []
    for answer in answers:
        text += [*answer, END]
    # A window doesn't reach over an end. Searched runs and drafts contain none.
    return Windows(text, list(range(len(text))), depth)


def longest_match(windows: Windows, run: list[int]) -> int:
    lengths = range(min(windows.depth, len(run)), 0, -1)
    return next((n for n in lengths if windows.behind(run[len(run) - n :])), 0)


def predicted_draft(sequence: ModelSequence, limit: int) -> list[int]:
    if not sequence.predicted:
        return []
    windows = ended_windows([[START, *sequence.predicted]], PREDICTION_DEPTH)
    length = longest_match(windows, sequence.marked)
    if length < min(2, len(sequence.marked)):
        return []
    return windows.draft(sequence.marked[-length:], limit, 0.0)[0]


@dataclass
class Ended:
    sequence: ModelSequence
    text: list[int]
    is_gone: bool = False

    @property
    def room(self) -> int:
        return len(self.text) + 1


@dataclass
class ModelAnswers:
    """Recent completions of all namespaces."""

    max_tokens: int
    ended: list[Ended] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(answer.room for answer in self.ended)

    def add(self, sequence: ModelSequence) -> None:
        if not sequence.answer or self.max_tokens <= 2:
            return
        kept = sequence.answer[-(self.max_tokens - 2) :]
        whole = len(kept) == len(sequence.answer)
        answer = Ended(sequence, [START, *kept] if whole else kept)
        while self.num_tokens + answer.room > self.max_tokens:
            self.ended.pop(0)
        self.ended.append(answer)

    def take_back(self, sequence: ModelSequence) -> None:
        """Take back what the latest earlier life of the same sequence has added."""
        for answer in reversed(self.ended) if sequence.answer else ():
            other = answer.sequence
            skipped = 0 if answer.text[0] == START else len(other.answer) - len(answer.text)
            length = min(len(other.answer), len(sequence.answer))
            if (
                not answer.is_gone
                and (other.namespace, other.prompt) == (sequence.namespace, sequence.prompt)
                and skipped <= len(sequence.answer)
                and other.answer[skipped:length] == sequence.answer[skipped:length]
            ):
                answer.is_gone = True
                return

    def texts(self, namespace: bytes) -> list[list[int]]:
        return [
            answer.text
            for answer in self.ended
            if answer.sequence.namespace == namespace and not answer.is_gone
        ]


def ngram_draft(sequence: ModelSequence, limit: int, lengths: Sequence[int]) -> list[int]:
    """Draft from runs of the given `lengths`, longest first."""
    if predicted := predicted_draft(sequence, limit):
        return predicted
    known = sequence.known
    for length in lengths:
        run = known[len(known) - length :]
        for end in range(len(known) - 1, length - 1, -1):
            if len(known) > length and known[end - length : end] == run:
                text = list(known)
                for place in range(end, end + limit):
                    text.append(text[place])
                return text[len(known) :]
    return []


def suffix_draft(
    sequence: ModelSequence,
    limit: int,
    answers: ModelAnswers,
    *,
    max_depth: int,
    max_factor: float,
    min_probability: float,
) -> list[int]:
    if predicted := predicted_draft(sequence, limit):
        return predicted
    own, own_length = known_windows(sequence.known, max_depth)
    shared = ended_windows(answers.texts(sequence.namespace), max_depth)
    searched = [
        (own, sequence.known, own_length),
        (shared, sequence.marked, longest_match(shared, sequence.marked)),
    ]
    best: list[int] = []
    best_expected = 0.0
    for windows, text, longest in searched:
        count_before = 0
        for length in range(longest, 0, -1):
            most = int(min(limit, max_factor * length))
            if most < 1:
                break
            tokens, expected, count = windows.draft(text[-length:], most, min_probability)
            if count != count_before and expected > best_expected:
                best, best_expected = tokens, expected
            count_before = count
    return best
