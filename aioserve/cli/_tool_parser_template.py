"""The files of a new tool parser's project that say what it is; see `_plugin_project`."""

from __future__ import annotations

__all__ = ["PARSER", "README", "TESTS"]

PARSER = '''\
"""Tool calls of a family of models: JSON between two marks."""

from __future__ import annotations

from aioserve import JsonCalls, ToolParserSpec, hookimpl

FORMAT = JsonCalls(
    opens="<|call|>",
    closes="<|end_call|>",
    # A chat template with this text is written for the format.
    template_has=("<|call|>",),
)


@hookimpl
def aioserve_tool_parsers() -> list[ToolParserSpec]:
    return [ToolParserSpec("$module", FORMAT, "JSON between <|call|> and <|end_call|>", api=1)]
'''

TESTS = '''\
"""The format keeps its contract, and reads what its models write."""

from __future__ import annotations

import pytest
from aioserve import Engine
from aioserve.testing import FakeModel, check_tool_parser, read_calls, run_simulated
from $module import FORMAT


def test_it_keeps_the_contract() -> None:
    check_tool_parser(FORMAT)


@pytest.mark.parametrize("city", ["Oslo", "<|call|>", "São Paulo"])
def test_it_reads_a_call(city: str) -> None:
    arguments = f'{{"city": "{city}"}}'
    call = f'{{"name": "get_weather", "arguments": {arguments}}}'
    content, calls = read_calls(FORMAT, f"Let me see. <|call|>{call}<|end_call|>")
    assert content == "Let me see."
    assert [(one.name, one.arguments) for one in calls] == [("get_weather", arguments)]


def test_text_without_a_mark_is_content() -> None:
    assert read_calls(FORMAT, "call me <|later|>") == ("call me <|later|>", ())


def test_an_engine_knows_it_by_name() -> None:
    async def serve() -> None:
        async with Engine(FakeModel(), tool_parser="$module") as engine:
            assert (await engine.generate([1, 2, 3])).token_ids

    run_simulated(serve)
'''

README = """\
# $distribution

A format of tool calls for aioserve: JSON between two marks.

    pip install --editable '.[test]'
    aioserve plugins                    # it is listed
    aioserve plugins check $module
    pytest

Serve a model that calls tools so:

    aioserve serve path/to/model --tool-parser $module

or let the engine find the format by the model's chat template, as `template_has` says.
"""
