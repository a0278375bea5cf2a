"""Checks of arguments: each argument becomes a plain value, or is refused by name.

An argument may be an object of any class, whose methods raise, lie or never end. So its type
decides what it is. It becomes a plain int, float, bool, str or tuple of these, and only that is
compared, kept and handed on. Numbers may be of any class, numpy's and enums' too; a bool is no
number.
"""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from numbers import Integral, Real
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

__all__ = [
    "EMPTY_MAPPING",
    "MAX_INT",
    "MadeByNames",
    "Rule",
    "boolean",
    "boolean_or",
    "brief",
    "check",
    "check_fields",
    "choice",
    "counted",
    "integer",
    "mapping",
    "name",
    "number",
    "optional",
    "pairs",
    "plain_int",
    "plain_str",
    "plain_value",
    "quoted",
    "rules_of",
    "sequence",
    "several",
    "shown",
    "text",
    "unknown_argument",
]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

Rule = Callable[[object], T]
"""Callable that makes an argument a plain value, or raises an error that `check` understands."""

MAX_INT = 2**63 - 1
"""Largest value of arguments without a bound of their own: JSON, numpy and kernels can take it."""
MAX_SHOWN_CHARS = 1000
MAX_SHOWN_BITS = 128


class _Unfit(Exception):
    """Refusal by a rule: `_Unfit("be an int", "'x'", value, limit)`.

    The args are: what the argument must do, its value in short, the value, and the bound.
    """

    where = ""
    """Place of the refused entry in the argument, such as "[2]"; empty for the whole argument."""


def check(error: Callable[..., Exception], argument: str, value: object, rule: Rule[T]) -> T:
    """Return `value` as `rule` makes it plain.

    Raises `error(message, argument=, value=, limit=)` if the rule refuses it. `limit` is the bound
    that `value`, or its size, exceeds; None for a wrong type.
    """
    try:
        return rule(value)
    except _Unfit as unfit:
        must, got, found, limit = unfit.args
        message = f"{argument}{unfit.where} must {must}, got {got}"
        raise error(message, argument=argument, value=found, limit=limit) from unfit.__cause__


def integer(low: int, high: int = MAX_INT) -> Rule[int]:
    must = f"be an int in [{low}, {high}]"

    def rule(value: object) -> int:
        number = plain_int(value)
        if number is None:
            raise _Unfit(must, shown(value), value, None)
        if not low <= number <= high:
            raise _Unfit(must, shown(number), number, low if number < low else high)
        return number

    return rule


def number(low: float, high: float = math.inf, *, above: bool = False) -> Rule[float]:
    """Rule for finite numbers in [low, high]; with `above`, `low` itself is refused."""
    most = "finite" if high == math.inf else f"at most {high:g}"
    least = f"above {low:g}" if above else f"of at least {low:g}"
    within = f"in [{low:g}, {high:g}]" if high < math.inf and not above else f"{least} and {most}"
    must = f"be a number {within}"

    def rule(value: object) -> float:
        number, exact = _plain_float(value)
        if number is None or math.isnan(number):
            raise _Unfit(must, shown(value), value, None)
        below = number <= low if above else number < low
        if below or number > high or number == math.inf:
            raise _Unfit(must, shown(exact), exact, low if below else high)
        return number

    return rule


def boolean(value: object) -> bool:
    if value is True or value is False:
        return value
    raise _Unfit("be a bool", shown(value), value, None)


def text(low: int, high: int = MAX_INT) -> Rule[str]:
    """Rule for strs of `low` to `high` characters that UTF-8 can encode."""

    must = f"be a str of {low} to {high} characters" if low or high < MAX_INT else "be a str"

    def rule(value: object) -> str:
        text = plain_str(value)
        if text is None:
            raise _Unfit(must, shown(value), value, None)
        if not low <= len(text) <= high:
            raise _Unfit(must, shown(text), len(text), low if len(text) < low else high)
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: neither a log nor JSON can hold it
            raise _Unfit("be text that UTF-8 can encode", shown(text), text, None) from None
        return text

    return rule


name: Rule[str] = text(1, 256)


def choice(*choices: Any, pattern: tuple[str, str] | None = None) -> Rule[Any]:
    """Rule for one of `choices`, which are all strs or all ints.

    `pattern` allows further strs: a description for the message, and a regular expression that the
    whole str must match.
    """
    must = f"be one of {', '.join(map(repr, choices))}"
    if pattern is not None:
        must += f", or {pattern[0]}"
    plain = plain_str if isinstance(choices[0], str) else plain_int

    def rule(value: object) -> Any:
        chosen = plain(value)
        fits = pattern is not None and isinstance(chosen, str) and re.fullmatch(pattern[1], chosen)
        if chosen not in choices and not fits:
            raise _Unfit(must, shown(value), value if chosen is None else chosen, None)
        return chosen

    return rule


def boolean_or(word: str) -> Rule[Any]:
    """Rule for a bool, or the str `word`."""

    def rule(value: object) -> bool | str:
        if plain_str(value) == word:
            return word
        if value is not True and value is not False:
            raise _Unfit(f"be a bool or {word!r}", shown(value), value, None)
        return value

    return rule


def rules_of(kind: type[msgspec.Struct]) -> dict[str, Rule[Any]]:
    """Rules of a struct's fields, by name. Fields without a rule are left out.

    `Annotated[int, integer(1)]` names its rule itself. The rules of a bool and of a `Literal`
    follow from the type. `X | None` takes None and whatever the rule of `X` takes.
    """
    hints = get_type_hints(kind, include_extras=True)
    rules = {field: _rule_of(hint) for field, hint in hints.items()}
    return {field: rule for field, rule in rules.items() if rule is not None}


def _rule_of(hint: Any) -> Rule[Any] | None:
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if get_origin(hint) is Literal:
        return choice(*inner)
    if len(inner) == 2 and inner[1] is type(None):
        rule = _rule_of(inner[0])
        return None if rule is None else optional(rule)
    return boolean if hint is bool else None


def check_fields(
    error: Callable[..., Exception], struct: msgspec.Struct, rules: Mapping[str, Rule[Any]]
) -> None:
    """Replace each field's value by what its rule makes of it. Raises as `check` does."""
    for field, rule in rules.items():
        value = check(error, field, getattr(struct, field), rule)
        msgspec.structs.force_setattr(struct, field, value)


def optional(rule: Rule[T]) -> Rule[T | None]:
    return lambda value: None if value is None else rule(value)


def several(rule: Rule[T], most: int) -> Rule[tuple[T, ...]]:
    """Rule like `sequence`, which also takes None for no entries and one entry by itself."""
    of_many = sequence(rule, most)

    def tuple_of(value: object) -> tuple[T, ...]:
        if value is None or value is _NOTHING:
            return ()
        return (rule(value),) if _is_single(value) else of_many(value)

    return tuple_of


def sequence(rule: Rule[T], most: int, *, least: int = 0) -> Rule[tuple[T, ...]]:
    """Rule for an iterable of `least` to `most` entries, other than a str, bytes or a mapping.

    Reads at most `most + 1` entries.
    """

    def tuple_of(value: object) -> tuple[T, ...]:
        if _is_single(value):
            raise _Unfit("be a sequence", shown(value), value, None)
        entries = _entries(value, most, "sequence")
        if len(entries) < least:
            raise _Unfit(f"have at least {least} entries", len(entries), len(entries), least)
        return tuple(_within((index,), rule, entry) for index, entry in enumerate(entries))

    return tuple_of


def pairs(key: Rule[K], value: Rule[V], most: int) -> Rule[tuple[tuple[K, V], ...]]:
    """Rule for a mapping or a sequence of pairs. The last value of a key counts.

    None stands for no pairs.
    """

    def pair(given: object) -> tuple[K, V]:
        both = two(given)
        if len(both) != 2:
            raise _Unfit("be a pair", shown(given), given, None)
        return key(both[0]), value(both[1])

    two = sequence(lambda value: value, 2)
    of_many = sequence(pair, most)

    def pairs_of(given: object) -> tuple[tuple[K, V], ...]:
        if given is None:
            return ()
        if issubclass(type(given), Mapping):
            given = _entries(given, most, "mapping")
        found = dict(of_many(given))
        return tuple(found.items()) or _NOTHING

    return pairs_of


def mapping(key: Rule[K], value: Rule[V], most: int) -> Rule[MappingProxyType[K, V]]:
    """Rule for a mapping, of which a read-only copy is made. None stands for an empty mapping."""

    def copied(given: object) -> MappingProxyType[K, V]:
        if given is None:
            return EMPTY_MAPPING
        if not issubclass(type(given), Mapping):
            raise _Unfit("be a mapping", shown(given), given, None)
        found: dict[K, V] = {}
        for entry in _entries(given, most, "mapping"):
            if type(entry) is not tuple or len(entry) != 2:
                raise _Unfit("be a mapping that can be read", shown(given), given, None)
            name = _within(None, key, entry[0])
            found[name] = _within((name,), value, entry[1])
        return MappingProxyType(found) if found else EMPTY_MAPPING

    return copied


EMPTY_MAPPING: MappingProxyType[Any, Any] = MappingProxyType({})
_NOTHING: tuple[()] = ()
"""The shared empty tuple: the default of arguments that are seldom given."""
_SINGLE = (str, bytes, bytearray, memoryview, Mapping)


def _is_single(value: object) -> bool:
    return issubclass(type(value), _SINGLE) or not issubclass(type(value), Iterable)


def _entries(value: Any, most: int, kind: str) -> tuple[Any, ...]:
    """Return the entries of a sequence, or the pairs of a mapping. Reads at most `most + 1`."""
    try:
        entries = tuple(islice(value.items() if kind == "mapping" else value, most + 1))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        unfit = _Unfit(f"be a {kind} that can be read", shown(value), value, None)
        raise unfit from error
    if len(entries) > most:
        raise _Unfit(f"have at most {most} entries", f"{most + 1} or more", most + 1, most)
    return entries


def _within(place: tuple[object] | None, rule: Rule[T], value: object) -> T:
    """Apply `rule` to the entry at `place`, or to a key of a mapping if `place` is None."""
    try:
        return rule(value)
    except _Unfit as unfit:
        unfit.where = " key" if place is None else f"[{shown(place[0])}]"
        raise


def plain_int(value: object) -> int | None:
    """Return a number of any integer class as an int; None for anything else, bools included."""
    kind = type(value)
    if kind is int:
        return value  # pyright: ignore[reportReturnType]
    try:
        if kind is not bool and issubclass(kind, Integral):
            return operator.index(value)  # pyright: ignore[reportArgumentType]
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass
    return None


def plain_str(value: object) -> str | None:
    """Return a str of any class as a plain str; None for anything else."""
    return str.__str__(value) if issubclass(type(value), str) else None  # pyright: ignore


def _plain_float(value: object) -> tuple[float | None, float | None]:
    """Return a number as a float, and its exact value. The float of an int that is too large is
    infinite.
    """
    whole = plain_int(value)
    if whole is not None:
        try:
            return float(whole), whole
        except OverflowError:
            return (math.inf if whole > 0 else -math.inf), whole
    kind = type(value)
    try:
        if kind is not bool and issubclass(kind, Real):
            number = float(value)  # pyright: ignore[reportArgumentType]
            return number, number
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass
    return None, None


def plain_value(value: object) -> object:
    """Return what an error carries of a value: it can be kept, copied, pickled and shown.

    Short numbers, short strs, bools and None stay as they are. Everything else becomes its `shown`
    text.
    """
    kind = type(value)
    if kind is bool or kind is float or value is None:
        return value
    if kind is int and int.bit_length(value) <= MAX_SHOWN_BITS:  # pyright: ignore[reportArgumentType]
        return value
    if kind is str and str.__len__(value) <= MAX_SHOWN_CHARS:  # pyright: ignore[reportArgumentType]
        return value
    return shown(value)


class _Shortened(reprlib.Repr):
    """A `repr` that reads no more of Python's own collections, and of their subclasses, than it
    shows.
    """

    def repr1(self, x: Any, level: int) -> str:
        for kind in (int, str, bytes, bytearray, list, tuple, dict, set, frozenset):
            if type(x).__repr__ is kind.__repr__:
                return getattr(self, f"repr_{kind.__name__}")(x, level)
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:  # Python refuses to print very long ints
        bits = int.bit_length(x)
        return repr(x) if bits <= MAX_SHOWN_BITS else f"<int of {bits} bits>"

    def repr_bytes(self, x: bytes | bytearray, level: int) -> str:
        return repr(x[: self.maxstring]) + ("..." if len(x) > self.maxstring else "")

    repr_bytearray = repr_bytes

    # reprlib sorts dicts and sets of any size: shorten them first.

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_set(self, x: set[Any], level: int) -> str:
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)


_shortened = _Shortened()
_shortened.maxlevel = 2
_shortened.maxother = MAX_SHOWN_CHARS


_brief = reprlib.Repr()
_brief.maxstring = 60


def brief(value: object, *facts: object, **named: object) -> str:
    """Return a short `repr` with the facts of a value: `Sample('It rains.', 4 tokens)`.

    Texts among `named` are `quoted`. None and empty texts are left out.
    """
    told = [str(fact) for fact in facts]
    told += [
        f"{name}={_brief.repr_str(one, 1) if isinstance(one, str) else one}"
        for name, one in named.items()
        if one is not None and one != ""
    ]
    return f"{type(value).__name__}({', '.join(told)})"


def quoted(text: str) -> str:
    """Return the text in quotes, cut in its middle to at most 60 characters."""
    return _brief.repr_str(text, 1)


def counted(count: int, one: str, several: str | None = None, *, form: str = "") -> str:
    """Return a count with its noun: `1 page`, `2 pages`.

    `several` is the plural, by default `one` and an s. `form` is the count's format specification.
    """
    return f"{count:{form}} {one if count == 1 else several or one + 's'}"


def shown(value: object) -> str:
    """Return a short `repr` of any object as a plain str; Python's default if the object's own
    raises.
    """
    try:
        return str.__str__(_shortened.repr(value))[:MAX_SHOWN_CHARS]
    except KeyboardInterrupt:
        raise
    except BaseException:
        return object.__repr__(value)


def unknown_argument(call: str, name: str, known: Collection[str]) -> TypeError:
    """Return the error of a keyword argument that `call` doesn't have.

    If another engine has an argument of that name, it says what that is called here. Otherwise it
    names the nearest known one.
    """
    from aioserve.other_engines.answers import unknown_in_python

    return TypeError(unknown_in_python(call, name, known))


class MadeByNames(type(msgspec.Struct)):
    """Metaclass of structs that take keyword arguments only.

    The TypeError for an unknown name, or for a positional value, names the field that was probably
    meant.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args, **fields):
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                known, name = cls.__struct_fields__, cls.__name__
                if unknown := fields.keys() - set(known):
                    raise unknown_argument(name, min(unknown), known) from None
                if args:
                    field = _field_for(cls, args[0])
                    raise TypeError(
                        f"{name}() takes keyword arguments only: write {name}({field})"
                    ) from None
                raise


def _field_for(cls: Callable[..., Any], value: object) -> str:
    """Return the keyword argument that a positional value was meant for, such as `temperature=0.7`.

    It is the first field that takes such a value, or `**{...}` for a dict of fields.
    """
    fields: tuple[str, ...] = getattr(cls, "__struct_fields__", ())
    if type(value) is dict and value and value.keys() <= set(fields):
        return f"**{shown(value)}"
    for field in fields:
        try:
            cls(**{field: value})
        except Exception:
            continue
        return f"{field}={shown(value)}"
    return f"{''.join(fields[:1])}=..."
