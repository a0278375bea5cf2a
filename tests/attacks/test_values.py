"""Values at the doors of the Python API. Each gives what is asked for, or an error that names
argument, value and limit. The error can be shown, copied and pickled. Refused values leave nothing
behind in the engine, and no value holds up its loop."""

from __future__ import annotations

import array
import asyncio
import copy
import enum
import pickle
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import (
    AioserveError,
    ConfigError,
    DeadlineExceededError,
    Engine,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    PromptTooLongError,
    SamplingParams,
    TokenStream,
)
from aioserve.config import EngineConfig
from aioserve.testing import FakeModel
from aioserve.testing.fake_model import VOCAB_SIZE
from tests.attacks.held_loop import MAX_HELD_SECONDS, assert_loop_is_free
from tests.attacks.hostile import hostile_values, is_named, named_errors
from tests.engine.idle import all_given_back
from tests.tiers import clock_counts
from tests.timing import seconds_computing

PARAMS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
OPTIONS = tuple(field.name for field in msgspec.structs.fields(EngineConfig))
FIELDS = (
    "request_id",
    "cache_salt",
    "tenant",
    "priority",
    "ttft_target_seconds",
    "tpot_target_seconds",
    "deadline_seconds",
    "metadata",
    "session_id",
    "predicted_output_tokens",
)
PLAIN = (int, float, bool, str, bytes, tuple, type(None))
SHORT = SamplingParams(max_tokens=3, temperature=0.0, seed=0)


class Level(enum.IntEnum):
    LOW = 3


class Liar(list[Any]):
    """List whose methods say `length`, and give `items` again and again."""

    def __init__(self, length: object, items: Sequence[Any], times: int = 10**9) -> None:
        self.length, self.items, self.times = length, items, times
        super().__init__(items)

    def __len__(self) -> Any:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.times):
            yield from self.items


def kind_of(value: object) -> str:
    """Return the name by which pytest shows a value that it can't print."""
    return type(value).__name__


def raises(error: type[BaseException]) -> Any:
    def fail(*args: object) -> Any:
        raise error("planted")

    return fail


def unreadable(base: type, *touches: str, error: type[BaseException] = ValueError) -> Any:
    """A class whose `touches` raise, and its repr."""
    return type("Unreadable", (base,), dict.fromkeys((*touches, "__repr__"), raises(error)))


def refused(make: Callable[[], object], kind: type[AioserveError]) -> Any:
    """The error that comes of it: one that is fit to be shown, and survives copies."""
    with pytest.raises(kind) as caught:
        make()
    error: Any = caught.value
    assert is_named(error), error
    for twin in (error.copy(), copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(twin), repr(vars(twin))) == (str(error), repr(vars(error)))
    assert type(error.value) in PLAIN
    return error


@contextmanager
def an_engine() -> Iterator[Callable[[Callable[[Any], Awaitable[object]]], None]]:
    """Runs what is done to one engine, one after the other; each time nothing is left in it."""

    async def run(engine: Engine, use: Callable[[Any], Awaitable[object]]) -> None:
        await use(engine)
        assert await all_given_back(engine)

    with asyncio.Runner() as runner:
        engine = runner.run(Engine(FakeModel()).__aenter__())
        try:
            yield lambda use: runner.run(run(engine, use))
        finally:
            runner.run(engine.__aexit__(None, None, None))


def with_an_engine(use: Callable[[Any], Awaitable[object]]) -> None:
    with an_engine() as on_it:
        on_it(use)


# -- sampling parameters


@pytest.mark.parametrize(
    ("argument", "given", "value", "limit", "got"),
    [
        ("max_tokens", 10**400, "<int of 1329 bits>", 2**63 - 1, "<int of 1329 bits>"),
        ("max_tokens", -(10**5000), "<int of 16610 bits>", 1, "<int of 16610 bits>"),
        ("max_tokens", "x" * 10**6, "'xxxxxxxxxxxx...xxxxxxxxxxxxx'", None, None),
        ("top_k", 10**5000, "<int of 16610 bits>", 2**63 - 1, "<int of 16610 bits>"),
        ("n", 2**64, 2**64, 2**63 - 1, str(2**64)),
        ("best_of", 0, 0, 1, "0"),
        ("include_stop_str_in_output", 1, 1, None, "1"),
        ("seed", 10**400, "<int of 1329 bits>", 2**64 - 1, "<int of 1329 bits>"),
        ("temperature", 10**400, "<int of 1329 bits>", 100, "<int of 1329 bits>"),
        ("temperature", -(10**400), "<int of 1329 bits>", 0, "<int of 1329 bits>"),
        ("top_p", 10**5000, "<int of 16610 bits>", 1, "<int of 16610 bits>"),
        ("top_p", Fraction(3, 2), 1.5, 1, "1.5"),
        ("temperature", Decimal(1), "Decimal('1')", None, "Decimal('1')"),
        ("stop", "", 0, 1, "''"),
        ("stop", ["a", ""], 0, 1, "stop[1] must be a str of 1 to 256 characters, got ''"),
        ("stop", "half \ud800", "half \ud800", None, "UTF-8"),
        ("stop", {"a": 1}, "{'a': 1}", None, "{'a': 1}"),
        ("stop_token_ids", [1, -1], -1, 0, "stop_token_ids[1] must be"),
        ("stop_token_ids", [1, True], True, None, "stop_token_ids[1] must be"),
        ("stop_token_ids", bytearray(b"ab"), "bytearray(b'ab')", None, "got bytearray(b'ab')"),
        ("stop_token_ids", {1: 2}, "{1: 2}", None, "got {1: 2}"),
        ("stop_token_ids", iter(int, 1), 65, 64, "at most 64 entries"),
        ("stop_token_ids", range(10**18), 65, 64, "at most 64 entries"),
        ("stop_token_ids", Liar(1, [5]), 65, 64, "at most 64 entries"),
        ("stop", Liar(1, ["a"]), 17, 16, "at most 16 entries"),
        ("ignore_eos", np.bool_(True), "np.True_", None, "np.True_"),
    ],
    ids=kind_of,
)
def test_a_parameter_that_is_refused_is_named_with_its_value_and_the_bound_that_it_passed(
    argument: str, given: Any, value: object, limit: object, got: str | None
) -> None:
    error = refused(lambda: SamplingParams(**{argument: given}), InvalidSamplingError)
    assert (error.argument, error.value, error.limit) == (argument, value, limit)
    assert str(error).startswith(argument)
    assert (got or str(value)) in str(error)


@pytest.mark.parametrize(
    ("argument", "given", "kept"),
    [
        ("max_tokens", np.int64(5), 5),
        ("max_tokens", Level.LOW, 3),
        ("max_tokens", unreadable(int, "__lt__", "__index__", "__eq__")(7), 7),
        ("top_k", np.uint8(5), 5),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_p", Fraction(1, 2), 0.5),
        ("stop", unreadable(str, "__len__", "__iter__")("end"), ("end",)),
        ("stop", ["a", unreadable(str, "__len__")("b")], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("stop_token_ids", {1}, (1,)),
        ("stop_token_ids", (i for i in (1, 2)), (1, 2)),
        ("stop_token_ids", 7, (7,)),
        ("stop_token_ids", array.array("q", [1, 2]), (1, 2)),
    ],
    ids=kind_of,
)
def test_a_parameter_of_any_class_is_kept_as_a_plain_value(
    argument: str, given: Any, kept: object
) -> None:
    value = getattr(SamplingParams(**{argument: given}), argument)
    assert (value, type(value)) == (kept, type(kept))
    if isinstance(value, tuple):
        assert {type(item) for item in value} <= {int, str}


def test_parameters_are_checked_however_they_are_made() -> None:
    params = SamplingParams(max_tokens=5)
    with pytest.raises(InvalidSamplingError, match="max_tokens"):
        msgspec.structs.replace(params, max_tokens=0)
    for convert in (
        lambda: msgspec.json.decode(b'{"max_tokens": 0}', type=SamplingParams),
        lambda: msgspec.convert({"stop_token_ids": [-1]}, SamplingParams),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            convert()
        assert isinstance(caught.value.__cause__, InvalidSamplingError)
    copies = (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params)))
    assert all(twin == params for twin in copies)


@given(st.dictionaries(st.sampled_from(PARAMS), hostile_values(), min_size=1, max_size=2))
def test_fuzz_sampling_params(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except AioserveError:
        error = refused(lambda: SamplingParams(**values), InvalidSamplingError)
        assert error.argument in values
        return
    assert {type(value) for value in msgspec.structs.astuple(params)} <= set(PLAIN)
    assert repr(params)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


# -- options of the engine


@pytest.mark.parametrize(
    ("argument", "given", "value", "limit"),
    [
        ("num_pages", 10**5000, "<int of 16610 bits>", 2**31 - 1),
        ("num_pages", 0, 0, 1),
        ("memory_utilization", 10**400, "<int of 1329 bits>", 1),
        ("memory_utilization", 0, 0, 0),
        ("stall_timeout_seconds", float("nan"), None, None),
        ("page_size", 10**5000, "<int of 16610 bits>", None),
        ("page_size", unreadable(object, "__eq__", "__hash__")(), None, None),
        ("device", "x" * 10**6, "'xxxxxxxxxxxx...xxxxxxxxxxxxx'", None),
        ("eviction", "x" * 10**6, 10**6, 256),
        ("eviction", "", 0, 1),
        ("overlap", unreadable(object, "__bool__")(), None, None),
        ("preemption", ["swap"], "['swap']", None),
    ],
    ids=kind_of,
)
def test_an_option_that_is_refused_is_named_with_its_value_and_the_bound_that_it_passed(
    argument: str, given: Any, value: object, limit: object
) -> None:
    error = refused(lambda: Engine(FakeModel(), **{argument: given}), ConfigError)
    assert (error.argument, error.limit) == (argument, limit)
    assert value is None or error.value == value
    assert str(error).startswith(argument)


def test_an_engine_that_could_serve_nothing_is_refused() -> None:
    error = refused(lambda: Engine(FakeModel(), page_size=1, num_pages=1), ConfigError)
    assert (error.argument, error.value, error.limit) == ("num_pages", 1, 2)
    EngineConfig(page_size=1, num_pages=2)
    EngineConfig(page_size=2, num_pages=1)


def test_an_option_of_any_class_is_kept_as_a_plain_value() -> None:
    class Name(enum.StrEnum):
        NATIVE = "native"

    given = {
        "page_size": np.int32(8),
        "num_pages": Level.LOW,
        "stall_timeout_seconds": np.float64(5),
        "backend": Name.NATIVE,
        "eviction": unreadable(str, "__eq__", "__hash__")("lfu"),
    }
    config = EngineConfig(**given)
    assert config == EngineConfig(
        page_size=8, num_pages=3, stall_timeout_seconds=5.0, backend="native", eviction="lfu"
    )
    assert {type(value) for value in msgspec.structs.astuple(config)} <= set(PLAIN)


@given(st.dictionaries(st.sampled_from(OPTIONS), hostile_values(), min_size=1, max_size=2))
def test_fuzz_engine_options(values: dict[str, Any]) -> None:
    try:
        engine = Engine(FakeModel(), **values)
    except AioserveError:
        error = refused(lambda: Engine(FakeModel(), **values), ConfigError)
        assert error.argument in values
        return
    assert {type(value) for value in msgspec.structs.astuple(engine.config)} <= set(PLAIN)
    assert repr(engine.config)
    assert msgspec.json.decode(msgspec.json.encode(engine.config), type=EngineConfig)


# -- fields of a request


@pytest.mark.sampled(26)
@pytest.mark.parametrize(
    ("argument", "given", "value", "limit"),
    [
        ("request_id", "", 0, 1),
        ("request_id", "x" * 257, 257, 256),
        ("request_id", b"id", "b'id'", None),
        ("cache_salt", "x" * 10**6, 10**6, 256),
        ("tenant", unreadable(object, "__len__")(), None, None),
        ("request_id", "half \ud800", "half \ud800", None),
        ("priority", "high", "high", None),
        ("priority", True, True, None),
        ("priority", -(2**31) - 1, -(2**31) - 1, -(2**31)),
        ("priority", 10**5000, "<int of 16610 bits>", 2**31 - 1),
        ("ttft_target_seconds", -1, -1, 0),
        ("ttft_target_seconds", 10**400, "<int of 1329 bits>", float("inf")),
        ("tpot_target_seconds", float("inf"), float("inf"), float("inf")),
        ("tpot_target_seconds", True, True, None),
        ("deadline_seconds", 0, 0, 0),
        ("deadline_seconds", float("inf"), float("inf"), float("inf")),
        ("deadline_seconds", "1", "1", None),
        ("session_id", "", 0, 1),
        ("session_id", "x" * 257, 257, 256),
        ("session_id", 7, 7, None),
        ("predicted_output_tokens", 0, 0, 1),
        ("predicted_output_tokens", True, True, None),
        ("predicted_output_tokens", 2**63, 2**63, 2**63 - 1),
        ("predicted_output_tokens", 1.0, 1.0, None),
        ("metadata", "step", "step", None),
        ("metadata", [("step", "plan")], "[('step', 'plan')]", None),
        ("metadata", unreadable(dict, "items", "keys", "__iter__")(), None, None),
    ],
    ids=kind_of,
)
def test_a_field_that_is_refused_is_named_with_its_value_and_the_bound_that_it_passed(
    argument: str, given: Any, value: object, limit: object
) -> None:
    async def attack(engine: Any) -> None:
        error = refused(lambda: engine.stream([5], **{argument: given}), InvalidRequestError)
        assert (error.argument, error.limit) == (argument, limit)
        assert value is None or error.value == value
        assert str(error).startswith(f"{argument} must be ")

    with_an_engine(attack)


@pytest.mark.parametrize(
    ("given", "message", "value", "limit"),
    [
        (dict.fromkeys(map(str, range(17)), ""), " must have at most 16 entries, got 17", 17, 16),
        ({1: "x"}, " key must be a str of 0 to 64 characters, got 1", 1, None),
        ({"k" * 65: "x"}, " key must be a str of 0 to 64 characters, got 'kk", 65, 64),
        ({"\ud800": "x"}, " key must be text that UTF-8 can encode", "\ud800", None),
        ({"k": None}, "['k'] must be a str of 0 to 512 characters, got None", None, None),
        ({"k": "x" * 513}, "['k'] must be a str of 0 to 512 characters, got 'xx", 513, 512),
        ({"k": b"x"}, "['k'] must be a str of 0 to 512 characters, got b'x'", "b'x'", None),
        ({"k": {"a": "b"}}, "['k'] must be a str of 0 to 512 characters, got {", None, None),
    ],
    ids=kind_of,
)
def test_what_is_wrong_with_metadata_is_told_by_its_key(
    given: Any, message: str, value: object, limit: object
) -> None:
    async def attack(engine: Any) -> None:
        error = refused(lambda: engine.stream([5], metadata=given), InvalidRequestError)
        assert str(error).startswith(f"metadata{message}")
        assert (error.argument, error.limit) == ("metadata", limit)
        assert value is None or error.value == value

    with_an_engine(attack)


def test_metadata_that_never_ends_is_read_no_further_than_its_bound() -> None:
    class Endless(dict[str, str]):
        read = 0

        def items(self) -> Any:
            while True:
                self.read += 1
                yield str(self.read), ""

    class Triples(dict[str, str]):
        def items(self) -> Any:
            return [("a", "b", "c")]

    async def attack(engine: Any) -> None:
        endless = Endless()
        error = refused(lambda: engine.stream([5], metadata=endless), InvalidRequestError)
        assert (error.argument, error.limit, endless.read) == ("metadata", 16, 17)
        error = refused(lambda: engine.stream([5], metadata=Triples()), InvalidRequestError)
        assert str(error).startswith("metadata must be a mapping that can be read")

    with_an_engine(attack)


def test_parameters_that_only_look_like_some_are_refused() -> None:
    class Mock:
        __class__ = SamplingParams  # pyright: ignore[reportAssignmentType]

    async def attack(engine: Any) -> None:
        for params in (Mock(), unreadable(object)(), {}, SamplingParams, 5):
            error = refused(lambda params=params: engine.stream([5], params), InvalidSamplingError)
            assert error.argument == "params"

    with_an_engine(attack)


@pytest.mark.more
def test_fuzz_request_fields() -> None:
    names = st.sampled_from((*FIELDS, "params"))

    @given(st.dictionaries(names, hostile_values(), min_size=1, max_size=3))
    def attacked(fields: dict[str, Any]) -> None:
        async def attack(engine: Any) -> None:
            arguments = {"params": SHORT} | fields
            try:
                answer = await engine.generate([5], **arguments)
            except DeadlineExceededError:  # which is as long as it takes
                assert "deadline_seconds" in fields
            except AioserveError:
                error = refused(lambda: engine.stream([5], **arguments), InvalidRequestError)
                assert error.argument in fields
            else:
                assert answer.usage.completion_tokens
                assert type(answer.request_id) is str

        on_it(attack)

    with an_engine() as on_it:
        attacked()


# -- prompts of token ids


@pytest.mark.parametrize(
    ("prompt", "value", "limit", "index"),
    [
        ([10**30], 10**30, VOCAB_SIZE, 0),
        ([5, 2**64], 2**64, VOCAB_SIZE, 1),
        ([5, -(10**5000)], "<int of 16610 bits>", 0, 1),
        ([5, -1], -1, 0, 1),
        ([5, VOCAB_SIZE], VOCAB_SIZE, VOCAB_SIZE, 1),
        ([5, None], None, None, 1),
        ([True, False], True, None, 0),
        ([5, True], True, None, 1),
        ([1.0], 1.0, None, 0),
        ([5, 1.0], 1.0, None, 1),
        ([5, "a"], "a", None, 1),
        ([5, {"role": "user", "content": "x"}], None, None, 1),
        ([5, unreadable(object, "__index__", "__int__")()], None, None, 1),
        ([5, unreadable(int, "__lt__", "__index__")(10**30)], 10**30, VOCAB_SIZE, 1),
        ((5, np.bool_(True)), "np.True_", None, 1),
        ((5, np.int64(-7)), -7, 0, 1),
        (np.array([True, False]), "np.True_", None, 0),
        (np.array([5.0]), "np.float64(5.0)", None, 0),
        (np.array(["a"]), "np.str_('a')", None, 0),
        (np.array([5, None], dtype=object), None, None, 1),
        (np.array([5, 2**64 - 1], dtype=np.uint64), 2**64 - 1, VOCAB_SIZE, 1),
        (np.array([5, -1], dtype=">i8"), -1, 0, 1),
        (array.array("f", [5.0]), 5.0, None, 0),
        (range(VOCAB_SIZE - 1, VOCAB_SIZE + 1), VOCAB_SIZE, VOCAB_SIZE, 1),
    ],
    ids=kind_of,
)
def test_the_first_bad_token_id_is_named_with_its_index(
    prompt: Any, value: object, limit: object, index: int
) -> None:
    async def attack(engine: Any) -> None:
        error = refused(lambda: engine.stream(prompt, SHORT), InvalidPromptError)
        assert error.argument == "prompt"
        assert value is None or error.value == value
        assert error.limit == limit
        assert str(error).startswith(f"token ids of the prompt must be ints in [0, {VOCAB_SIZE}), ")
        assert str(error).endswith(f" at index {index}")

    with_an_engine(attack)


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        array.array("H", [5, 6, 7]),
        np.array([5, 6, 7], np.int64),
        np.array([5, 6, 7], np.uint8),
        np.array([5, 6, 7], ">i4"),
        np.array([5, 0, 6, 0, 7])[::2],
        np.array([5, 6, 7], dtype=object),
        list(np.array([5, 6, 7])),
        [5, unreadable(int, "__index__", "__eq__")(6), np.uint64(7)],
        Liar(3, [5, 6, 7], times=1),
    ],
    ids=kind_of,
)
def test_ints_of_any_class_are_token_ids(prompt: Any) -> None:
    async def attack(engine: Any) -> None:
        plain = await engine.generate([5, 6, 7], SHORT)
        assert (await engine.generate(prompt, SHORT)).token_ids == plain.token_ids

    with_an_engine(attack)


def test_an_array_that_changes_afterwards_is_not_the_prompt() -> None:
    async def attack(engine: Any) -> None:
        plain = await engine.generate([5, 6, 7], SHORT)
        prompt = np.array([5, 6, 7], np.int32)
        stream = engine.stream(prompt, SHORT)
        prompt[:] = 10**9
        assert [token.id async for token in stream] == list(plain.token_ids)

    with_an_engine(attack)


@pytest.mark.parametrize(
    "prompt",
    [
        Liar(3, [5]),
        Liar(3, [5, 6], times=1),
        Liar(0, [5]),
        Liar(-1, [5]),
        Liar("three", [5]),
        unreadable(list, "__len__")([5]),
        unreadable(list, "__len__", error=SystemExit)([5]),
        unreadable(list, "__iter__")([5]),
        unreadable(list, "__iter__", "__getitem__", error=asyncio.CancelledError)([5]),
        np.zeros((2, 2), np.int32),
        np.array(7),
        np.zeros(0, np.int32),
        np.zeros((0, 3), np.int32),
        {5, 6},
        {5: 6},
        iter([5]),
        memoryview(b"ab"),
    ],
    ids=kind_of,
)
def test_what_is_no_sequence_of_token_ids_is_refused(prompt: Any) -> None:
    async def attack(engine: Any) -> None:
        error = refused(lambda: engine.stream(prompt, SHORT), InvalidPromptError)
        assert str(error).startswith("prompt ")

    with_an_engine(attack)


def test_a_prompt_that_is_too_long_is_refused_unread() -> None:
    class Long(Sequence[int]):
        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: Any) -> Any:
            assert index == 0
            return 5

    async def attack(engine: Any) -> None:
        for prompt in (range(10**18), Long(), np.zeros(10**7, np.int32), Liar(10**6, [5])):
            error = refused(lambda prompt=prompt: engine.stream(prompt), PromptTooLongError)
            assert (error.value, error.limit) == (len(prompt), 255)

    with_an_engine(attack)


MILLION = 1_000_000


@pytest.mark.sampled(2)
@pytest.mark.clock
@pytest.mark.parametrize(
    "last", [5, 10**30, None, True, np.int64(5), np.int64(-1), Level.LOW], ids=kind_of
)
@pytest.mark.asyncio
async def test_a_million_token_ids_do_not_hold_up_the_loop(last: Any) -> None:
    model = FakeModel(num_pages=70_000, max_model_len=MILLION + 2)
    ids: list[Any] = [random.randrange(VOCAB_SIZE) for _ in range(MILLION)]
    ids[-1] = last
    prompts = (ids, tuple(ids), np.array(ids, dtype=object))  # making them is no part of the attack
    engine: Any
    async with Engine(model) as engine:

        async def attack() -> None:
            for prompt in prompts:
                await asyncio.sleep(0)
                try:
                    engine.stream(prompt, SHORT).close()
                except InvalidPromptError as error:
                    assert str(error).endswith(f" at index {MILLION - 1}")  # noqa: PT017
                await asyncio.sleep(0)

        await assert_loop_is_free(attack)


def array_of_objects(given: Sequence[Any]) -> npt.NDArray[np.object_]:
    """Each item as it is: `np.array` looks into those that are sequences, however long."""
    array = np.empty(len(given), dtype=object)
    for index, item in enumerate(given):
        array[index] = item
    return array


def hostile_prompts() -> st.SearchStrategy[Any]:
    items = st.one_of(st.integers(0, VOCAB_SIZE - 1), hostile_values())
    lists = st.lists(items, min_size=1, max_size=6)
    return st.one_of(
        hostile_values(),
        lists,
        lists.map(tuple),
        lists.map(array_of_objects),
        st.builds(Liar, st.integers(-1, 5) | hostile_values(), lists, st.integers(0, 3)),
        st.builds(
            lambda kind, shape: np.ones(shape, kind),
            st.sampled_from("?bBhHiIqQefdgFDOSU") | st.sampled_from((">i8", ">u2", "M8[s]", "m8")),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=300),
    )


@pytest.mark.clock
def test_fuzz_prompts() -> None:
    @given(hostile_prompts())
    def attacked(prompt: Any) -> None:
        async def attack(engine: Any) -> None:
            held: list[float] = []
            streams: list[TokenStream] = []

            def submit() -> None:
                with named_errors():
                    streams[:] = [engine.stream(prompt, SHORT)]

            while not held or (streams and min(held) > MAX_HELD_SECONDS and len(held) < 3):
                held.append(seconds_computing(submit))
            if streams:
                with named_errors():
                    assert len([token async for token in streams[-1]]) == 3
            assert not clock_counts() or min(held) <= MAX_HELD_SECONDS

        on_it(attack)

    with an_engine() as on_it:
        attacked()
