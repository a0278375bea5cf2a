"""Settings from flags, variables, a file and defaults.

The highest source with a value wins. Errors name the source, the key and the value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._settings import (
    DEFAULT,
    OTHER_VARIABLES,
    gather,
    made,
    settings_of,
    shown_settings,
)
from aioserve.cli.serve import SETTINGS, Keys, keys_of, serve
from aioserve.config import EngineConfig, Speculation
from aioserve.errors import ConfigError
from aioserve.server import ServerSettings
from aioserve.server.listening import Listening


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """One field of each kind."""

    a_bool: bool = False
    """Yes or no."""
    a_count: int = 1
    """A whole
    number."""
    a_float: float = 1.5
    a_text: str = "x"
    """Words."""
    a_choice: Literal["one", "two"] = "one"
    maybe: int | None = None
    names: Sequence[str] = ()
    sizes: Sequence[int] | None = None


KINDS = settings_of("engine", Kinds)
ENGINE = settings_of("engine", EngineConfig)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=","), min_size=1
).filter(lambda text: text == text.strip() and text != "none")
INTS = st.integers(-(10**18), 10**18)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "a_bool": st.booleans(),
    "a_count": INTS,
    "a_float": st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3)),
    "a_text": TEXTS,
    "a_choice": st.sampled_from(["one", "two"]),
    "maybe": INTS,
    "names": st.lists(TEXTS, max_size=3).map(tuple),
    "sizes": st.lists(INTS, max_size=3).map(tuple),
}
SOURCES = ("file", "variable", "flag")
"""Sources, from the lowest to the highest."""


def as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


@st.composite
def given_values(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Values of some settings, for each source."""
    return {
        source: {
            name: draw(VALUES[name])
            for name in draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=8))
        }
        for source in SOURCES
    }


@given(values=given_values())
def test_any_subset_of_sources_gives_the_value_of_the_highest(
    values: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "kinds.toml"
    lines = [f"{name} = {toml_of(value)}" for name, value in values["file"].items()]
    file.write_text("\n".join(["[engine]", *lines]), encoding="utf-8")
    found = gather(
        KINDS,
        flags={
            name: value if isinstance(value, bool) else as_text(value)
            for name, value in values["flag"].items()
        },
        environment={
            f"AIOSERVE_{name.upper()}": as_text(value) for name, value in values["variable"].items()
        },
        file=str(file),
    )
    for setting in KINDS:
        name = setting.name
        origins = {
            "flag": setting.flag,
            "variable": setting.variable,
            "file": f"{file}: engine.{name}",
        }
        heard = [source for source in SOURCES if name in values[source]]
        value = values[heard[-1]][name] if heard else setting.default
        assert found[name].origin == (origins[heard[-1]] if heard else DEFAULT)
        seen = found[name].value
        assert (tuple(seen) if isinstance(seen, list) else seen) == value
    # The values as shown are a file with the same settings.
    shown = tomllib.loads(shown_settings(KINDS, found))["engine"]
    assert shown == {
        name: list(one.value) if isinstance(one.value, list | tuple) else one.value
        for name, one in found.items()
        if one.value is not None
    }


def toml_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_of, value))}]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


WRONG = st.sampled_from(
    [
        ("a_bool", "maybe", "true or false", "[]"),
        ("a_count", "1.5", "a whole number", "1.5"),
        ("a_count", "0x10", "a whole number", '"0x10"'),
        ("a_float", "nan", "a decimal number", '"nan"'),
        ("maybe", "", "a whole number", "true"),
        ("sizes", "1,,2", "a whole number", '[1, "2"]'),
        ("names", None, "", '"a,b"'),
        ("a_text", None, "", "1"),
    ]
)


@given(wrong=WRONG, source=st.sampled_from(SOURCES))
def test_a_value_of_the_wrong_type_is_told_with_source_key_and_value(
    wrong: tuple[str, str | None, str, str],
    source: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    name, text, must, toml = wrong
    file = tmp_path_factory.getbasetemp() / "wrong.toml"
    file.write_text(f"[engine]\n{name} = {toml}\n")
    [setting] = [one for one in KINDS if one.name == name]
    if source == "file":
        options: dict[str, Any] = {"flags": {}, "environment": {}, "file": str(file)}
        parts = (f"{file}: engine.{name}", toml.strip('[]"')[:1])
    elif text is None:
        return
    else:
        variables = {setting.variable: text} if source == "variable" else {}
        flags = {name: text} if source == "flag" else {}
        options = {"flags": flags, "environment": variables, "file": None}
        parts = (setting.variable if source == "variable" else setting.flag, must, repr(text))
    with pytest.raises(ConfigError) as refused:
        gather(KINDS, **options)
    for part in parts:
        assert part in str(refused.value)
    assert refused.value.argument == name


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("AIOSERVE_MAX_NUM_SEQ", "AIOSERVE_MAX_NUM_SEQS"),
        ("AIOSERVE_PAGESIZE", "AIOSERVE_PAGE_SIZE"),
        ("AIOSERVE_OP", "AIOSERVE_OPS"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} .*; the nearest is {nearest}$"):
        gather(SETTINGS, flags={}, environment={variable: "1"}, file=None)


def test_variables_of_other_purposes_and_of_kubernetes_are_left_alone() -> None:
    others = dict.fromkeys(
        [
            *OTHER_VARIABLES,
            "AIOSERVE_SERVICE_HOST",
            "AIOSERVE_SERVICE_PORT_HTTP",
            "AIOSERVE_PORT_8000_TCP_ADDR",
            "PATH",
        ],
        "x",
    )
    assert gather(SETTINGS, flags={}, environment=others, file=None)["port"].origin == DEFAULT
    link = {"AIOSERVE_PORT": "tcp://10.0.0.1:8000"}
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        gather(SETTINGS, flags={}, environment=link, file=None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[engine]\npagesize = 1", "[engine] has no key 'pagesize'; the nearest is page_size"),
        ("[engine]\nport = 1", "[engine] has no key 'port'; it belongs into [server]"),
        ("[engines]\nseed = 1", "'engines' must be one of the tables [engine], [server]"),
        ("seed = 1", "'seed' must be one of the tables [engine], [server]; it belongs into [engin"),
        ("engine = 3", "engine must be a table, got 3"),
        ("[engine", "isn't TOML"),
        ("x" * 2**21, "more than"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_the_file(
    text: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        gather(SETTINGS, flags={}, environment={}, file=str(file))
    assert told in str(refused.value)
    assert str(file) in str(refused.value)


def test_what_a_struct_refuses_is_told_with_its_origin() -> None:
    values = gather(SETTINGS, flags={}, environment={"AIOSERVE_PAGE_SIZE": "3"}, file=None)
    with pytest.raises(ConfigError, match=r"^AIOSERVE_PAGE_SIZE: page_size must be one of .* 3$"):
        made(EngineConfig, values, ENGINE)


# -- structs in structs


SPECULATING: list[tuple[dict[str, str], dict[str, str], str, Speculation | None]] = [
    ({}, {}, "", None),
    ({"speculation": "suffix"}, {}, "", Speculation(drafter="suffix")),
    ({"speculation": "none"}, {"AIOSERVE_SPECULATION": "suffix"}, "", None),
    (
        {"speculation": "suffix:max_depth=32"},
        {"AIOSERVE_SPECULATION_MAX_TOKENS": "4"},
        "speculation_max_tokens = 5",
        Speculation(drafter="suffix:max_depth=32", max_tokens=4),
    ),
    (
        {},
        {},
        'speculation = "ngram"\nspeculation_max_tokens = 5',
        Speculation(drafter="ngram", max_tokens=5),
    ),
    (
        {"speculation_acceptance": "rejection"},
        {"AIOSERVE_SPECULATION": "model"},
        "",
        Speculation(drafter="model", acceptance="rejection"),
    ),
]


@pytest.mark.parametrize(("flags", "environment", "keys", "expected"), SPECULATING)
def test_fields_of_a_struct_in_a_struct_come_from_any_source(
    flags: dict[str, str],
    environment: dict[str, str],
    keys: str,
    expected: Speculation | None,
    tmp_path: Path,
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"[engine]\n{keys}")
    values = gather(SETTINGS, flags=flags, environment=environment, file=str(file))
    assert made(EngineConfig, values, ENGINE).speculation == expected
    again = tmp_path / "again.toml"
    again.write_text(shown_settings(SETTINGS, values))
    values = gather(SETTINGS, flags={}, environment={}, file=str(again))
    assert made(EngineConfig, values, ENGINE).speculation == expected


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"AIOSERVE_SPECULATION_MAX_TOKENS": "65", "AIOSERVE_SPECULATION": "suffix"},
            r"^AIOSERVE_SPECULATION_MAX_TOKENS: max_tokens must be an int in \[1, 64\], got 65$",
        ),
        (
            {"AIOSERVE_SPECULATION_MAX_TOKENS": "4"},
            "^AIOSERVE_SPECULATION_MAX_TOKENS: max_tokens=4 of speculation has no effect without",
        ),
        ({"AIOSERVE_SPECULATION": ""}, "^AIOSERVE_SPECULATION: drafter must be a str of 1 to"),
        (
            {"AIOSERVE_SPECULATION_ACCEPTANCE": "all", "AIOSERVE_SPECULATION": "model"},
            "^AIOSERVE_SPECULATION_ACCEPTANCE: acceptance must be one of 'match', 'rejection'",
        ),
    ],
)
def test_what_a_struct_in_a_struct_refuses_is_told_with_its_origin(
    environment: dict[str, str], told: str
) -> None:
    values = gather(SETTINGS, flags={}, environment=environment, file=None)
    with pytest.raises(ConfigError, match=told):
        made(EngineConfig, values, ENGINE)


# -- one source of truth


@pytest.mark.parametrize("kind", [EngineConfig, ServerSettings, Listening, Keys])
def test_every_field_is_a_setting_with_a_flag_and_help(kind: type[msgspec.Struct]) -> None:
    by_name = {setting.name: setting for setting in SETTINGS}
    flags = serve.__signature__.parameters
    for field in msgspec.structs.fields(kind):
        if field.name == "api_keys":
            continue  # --api-key
        assert by_name[field.name].default == field.default
        assert by_name[field.name].help, f"{field.name} has no docstring"
        assert field.name in flags


def test_no_two_settings_have_one_name_and_no_variable_is_anothers() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(set(names)) == len(names)
    assert not {setting.variable for setting in SETTINGS} & OTHER_VARIABLES


def test_a_setting_without_a_text_is_seen_when_the_command_is_made() -> None:
    class Odd(msgspec.Struct):
        odd: dict[str, int] = {}

    with pytest.raises(TypeError, match="dict"):
        settings_of("engine", Odd)


def test_help_is_the_docstring_below_the_field() -> None:
    texts = {setting.name: setting.help for setting in KINDS}
    assert texts["a_count"] == "A whole number."
    assert texts["a_float"] == ""


# -- keys


KEY = st.from_regex(r"sk-[A-Za-z0-9]{20,40}", fullmatch=True)


@given(
    padding=st.sampled_from(["", "=", "=="]),
    name=st.from_regex("[a-z][a-z0-9]{0,9}", fullmatch=True),
)
def test_a_key_may_have_a_name_and_end_with_padding(padding: str, name: str) -> None:
    key = "c2VjcmV0LXNlY3JldA" + padding
    assert keys_of(Keys(api_key=(key,))) == {"key-1": key}
    assert keys_of(Keys(api_key=(f"{name}={key}",))) == {name: key}


def test_keys_of_a_file_come_behind_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nci=aaaaaaaa\nbbbbbbbb\n")
    keys = Keys(api_key=("cccccccc",), api_key_file=str(file))
    assert keys_of(keys) == {"key-1": "cccccccc", "ci": "aaaaaaaa", "key-3": "bbbbbbbb"}


@pytest.mark.parametrize("text", [b"", b"# nothing\n", b"\xff\xfe", b"a=one\na=two\n"])
def test_a_file_of_keys_that_makes_no_sense_is_refused_without_showing_it(
    text: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        keys_of(Keys(api_key_file=str(file)))
    assert "one" not in str(refused.value)
    assert "two" not in str(refused.value).replace("two keys", "")


@given(key=KEY)
def test_no_key_is_ever_shown(key: str) -> None:
    for flags, environment in (
        ({"api_key": (key,)}, {}),
        ({}, {"AIOSERVE_API_KEY": key.replace(",", "x")}),
    ):
        values = gather(SETTINGS, flags=flags, environment=environment, file=None)
        shown = shown_settings(SETTINGS, values)
        assert f"api_key: {len(values['api_key'].value)}, not shown" in shown
        assert key not in shown
