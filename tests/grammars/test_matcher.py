"""A matcher is where its tokens have brought it, whichever way these came."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.grammars.vocabulary import SLICES, Vocabulary, llguidance
from aioserve.structured_output import MAX_CHOICE_CHARS, StructuredOutput
from aioserve.text.tokenizer import Tokenizer
from tests.grammars.walks import END, PADDING, Walk, ids_in, pyhelp, single_bytes

SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["description", "kind", "lines"],
    "additionalProperties": False,
}


def grammar(**form: object) -> CompiledGrammar:
    return compile_grammar(pyhelp()[1], StructuredOutput(**form))  # pyright: ignore


@pytest.fixture(scope="module")
def compact() -> CompiledGrammar:
    return grammar(json_schema=SCHEMA, disable_any_whitespace=True)


def same(one: GrammarMatcher, other: GrammarMatcher) -> bool:
    return (
        np.array_equal(one.allowed(), other.allowed())
        and one.forced() == other.forced()
        and one.is_accepting == other.is_accepting
        and one.has_ended == other.has_ended
    )


@given(seed=st.integers(0, 10_000), cut=st.floats(0, 1), asks=st.integers(0, 3))
def test_replays_are_the_same_and_live_on_their_own(
    compact: CompiledGrammar, seed: int, cut: float, asks: int
) -> None:
    walk = Walk(compact, {END}, seed)
    at = int(cut * len(walk.ids))
    replayed = compact.matcher({END})
    for index, token_id in enumerate(walk.ids[:at]):
        if index % 3 < asks:  # whether it is asked on its way makes no difference
            replayed.allowed()
        assert replayed.accept(token_id)
    again, whole = compact.matcher({END}), compact.matcher({END})
    assert again.accept_all(walk.ids[:at])
    assert whole.accept_all(walk.ids)
    assert same(whole, walk.matcher)
    assert same(again, replayed)  # the other went on alone
    assert replayed.accept_all(walk.ids[at:])
    assert same(replayed, walk.matcher)


@given(seed=st.integers(0, 10_000))
def test_taking_what_is_forced_at_once_leads_to_the_same_place(
    compact: CompiledGrammar, seed: int
) -> None:
    walk = Walk(compact, {END}, seed)
    matcher, at, jumps = compact.matcher({END}), 0, 0
    while at < len(walk.ids):
        if forced := matcher.forced():
            assert list(forced) == walk.ids[at : at + len(forced)]
            assert matcher.accept_all(forced)
            at += len(forced)
            jumps += 1
        else:
            assert matcher.accept(walk.ids[at])
            at += 1
    assert same(matcher, walk.matcher)
    assert jumps


@given(seed=st.integers(0, 10_000), at=st.floats(0, 1), wrong=st.integers(-1, 4096 + PADDING))
def test_a_token_is_taken_exactly_if_it_is_allowed(
    compact: CompiledGrammar, seed: int, at: float, wrong: int
) -> None:
    walk = Walk(compact, {END}, seed)
    matcher, before = compact.matcher({END}), compact.matcher({END})
    for each in (matcher, before):
        assert each.accept_all(walk.ids[: int(at * len(walk.ids))])
    allowed = wrong in ids_in(matcher.allowed())
    assert matcher.accept(wrong) == allowed
    if not allowed:
        assert same(matcher, before)


def test_what_is_forced_is_written_as_the_tokenizer_writes_it(compact: CompiledGrammar) -> None:
    tokenizer, _ = pyhelp()
    forced = compact.matcher({END}).forced()
    canonical = tokenizer.encode('{"description":"')
    assert list(forced) == canonical[: len(forced)]
    assert len(forced) >= len(canonical) - 1


def test_the_only_end_of_a_whole_answer_is_forced_and_one_of_several_is_not() -> None:
    only = grammar(choice=["a"])
    for end_ids, forced in (({END}, (END,)), ({END, 0}, ()), (set(), ())):
        matcher = only.matcher(end_ids)
        assert matcher.accept_all(matcher.forced())
        assert matcher.is_accepting
        assert matcher.forced() == forced
        assert ids_in(matcher.allowed()) == sorted(end_ids)


def test_a_long_way_that_is_forced_is_looked_up_once_and_followed_at_no_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, _ = pyhelp()
    choice = "the answer that is given " * 300
    long = grammar(choice=[choice])
    monkeypatch.setattr(GrammarMatcher, "_look_ahead", lambda self: 1 / 0)
    matcher = long.matcher({END})
    canonical = tokenizer.encode(choice)[:1000]
    assert list(matcher.forced(1000)) == canonical
    tracemalloc.start()
    try:
        assert matcher.accept_all(canonical)
        assert tracemalloc.get_traced_memory()[1] < 8192  # no copy of all that is ahead
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("forks", [True, False])
def test_the_longest_choices_are_followed_to_their_end(forks: bool) -> None:
    tokenizer, _ = pyhelp()
    choice = "\U0001f600" * MAX_CHOICE_CHARS
    matcher = grammar(choice=[choice, "a"] if forks else [choice]).matcher({END})
    ids = tokenizer.encode(choice)
    assert matcher.accept_all(ids)
    assert matcher.is_accepting, matcher.error


def test_ids_beyond_the_vocabulary_are_never_allowed_unless_they_end_an_answer() -> None:
    matcher = grammar(regex="(.|\n)*").matcher({END, 4100})
    allowed = ids_in(matcher.allowed())
    assert [token_id for token_id in allowed if token_id >= 4096] == [4100]
    assert END in allowed
    assert len(matcher.allowed()) == (4096 + PADDING + 31) // 32
    assert not matcher.accept(4096)
    assert matcher.accept(4100)
    assert matcher.has_ended
    assert not matcher.accept(4100)
    assert not matcher.allowed().any()


def test_an_end_that_has_a_text_ends_an_answer_that_has_the_form_and_is_no_part_of_it() -> None:
    tokenizer, _ = pyhelp()
    (b,) = tokenizer.encode("b")
    matcher = grammar(regex="ab*c?").matcher({b})
    assert not matcher.accept(b)
    assert matcher.accept_all(tokenizer.encode("a"))
    assert b in ids_in(matcher.allowed())
    assert matcher.accept(b)
    assert matcher.has_ended
    forced = grammar(choice=["abc"]).matcher({b}).forced()
    assert b not in forced


def test_a_grammar_that_is_too_costly_to_follow_says_so() -> None:
    pattern = ".*[ab].{200}[cd].{200}"
    matcher = grammar(json_schema={"type": "string", "pattern": pattern}).matcher({END})
    rng = random.Random(0)
    while allowed := ids_in(matcher.allowed()):
        assert matcher.accept(rng.choice(allowed[:200]))  # single characters, most of them
    assert "too many states" in str(matcher.error)
    assert not matcher.is_accepting
    assert not matcher.accept(END)


def spaced(kind: str) -> Tokenizer:
    """A tokenizer like SentencePiece's: words with a mark for the space before them, and bytes for
    the rest."""
    words = [
        "\u2581",
        "\u2581a",
        "\u2581b",
        "a",
        "b",
        "\u2581yes",
        "yes",
        "\u2581no",
        "no",
        '"',
        ":",
    ]
    vocab = {"<unk>": 0, "</s>": 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: 258 + i for i, word in enumerate(words)}
    merges = [("\u2581", "a"), ("\u2581", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    if kind == "metaspace":
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("metaspace", ["a b", "b"]),
        ("metaspace", ["yes", "no no"]),
        ("strip", ["a b", "b"]),
        ("strip", ["yes", "no no"]),
        ("strip", ['"\u00e4":"a"']),
    ],
)
def test_a_tokenizer_that_drops_a_space_at_the_start_begins_no_answer_with_one(
    kind: str, choice: list[str]
) -> None:
    tokenizer = spaced(kind)
    vocabulary = Vocabulary(tokenizer, 300)
    compiled = compile_grammar(vocabulary, StructuredOutput(choice=choice))
    drawn = set()
    for seed in range(60):
        walk = Walk(compiled, {1}, seed)
        assert walk.matcher.has_ended
        drawn.add(tokenizer.decode(walk.ids))
    assert drawn == set(choice)


def test_a_vocabulary_of_bytes_writes_what_it_has(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    matcher = compile_grammar(vocabulary, StructuredOutput(choice=["\u4e2d\U0001f600"])).matcher(
        {299}
    )
    assert bytes(matcher.forced()) == "\u4e2d\U0001f600".encode()
    assert matcher.accept_all(matcher.forced())
    assert ids_in(matcher.allowed()) == [299]


def test_what_is_sorted_out_beforehand_is_what_the_library_sorts_out() -> None:
    assert set(SLICES) < set(llguidance().LLTokenizer.general_slices())


LINE = '{"a":1,"b":[1,2]}'
SPACED = '{"a": 1, "b": [1, 2]}'
INDENTED = '{\n  "a": 1,\n  "b": [1, 2]\n}'
BLANKS = '{"a":      1, "b": [1, 2]}'


@pytest.mark.parametrize(
    ("max_whitespace", "taken"),
    [
        (None, [LINE, SPACED]),
        (0, [LINE]),
        (1, [LINE, SPACED]),
        (3, [LINE, SPACED, INDENTED]),
        (32, [LINE, SPACED, INDENTED, BLANKS]),
    ],
)
def test_white_space_is_what_json_dumps_writes_unless_more_is_allowed(
    max_whitespace: int | None, taken: list[str]
) -> None:
    tokenizer, _ = pyhelp()
    compiled = grammar(json_object=True, max_whitespace=max_whitespace)

    def takes(text: str) -> bool:
        matcher = compiled.matcher({END})
        return matcher.accept_all(tokenizer.encode(text)) and matcher.is_accepting

    assert [text for text in (LINE, SPACED, INDENTED, BLANKS) if takes(text)] == taken
