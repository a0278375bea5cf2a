"""Server whose model holds conversations.

The model calls a tool once a user has asked, and reports its result once it hears that. An answer
with a required form has the arguments of the tool.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.steps.plan import SampleRow, WorkItem
from aioserve.structured_output import StructuredOutput
from aioserve.testing.fake_device import SlotStart
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedDevice, ScriptedModel
from tests.server.scripts import TEMPLATE, SeenTemplate
from tests.server.serving import listening

__all__ = ["ASKED", "conversing", "heard"]

CALLS = (
    "<think>Two numbers.</think>I add them."
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)
FORM = '{"a": 1, "b": 2}'
TELLS = "<think>There it is.</think>It is 3."
# The device always sees the last token of a prompt.
LAST_ROLE = TEMPLATE.replace("assistant\n", "assistant\n{{ messages[-1].role[0] }}")
ASKED = (
    "user:What is 1 and 2?",
    'assistant:I add them.CALL{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "tool:3",
    "assistant:It is 3.",
)
"""One turn, as the model hears it in later prompts."""


class _Device(ScriptedDevice):
    def answer_of(self, item: WorkItem, row: SampleRow, start: SlotStart) -> int:
        if type(start.params.structured_output) is StructuredOutput:
            return 2
        return int(chr(item.token_ids[row.offset]) == "t")


class ConversingModel(ScriptedModel):
    device = _Device

    def __init__(self) -> None:
        super().__init__(LAST_ROLE, CALLS, TELLS, FORM)
        self.template = self.seen = SeenTemplate(LAST_ROLE, origin="test")
        self.seen.prompts = []


@asynccontextmanager
async def conversing(key: str) -> AsyncIterator[tuple[str, SeenTemplate]]:
    """Serve the model; yield the URL, and the template that keeps prompts."""
    model = ConversingModel()
    settings = ServerSettings(api_keys=[key], served_model_names=["scripted"])
    async with Engine(model, jump_forward=False) as engine:
        async with listening(create_app(engine, settings)) as url:
            yield url, model.seen
        assert await all_given_back(engine)


def heard(prompt: str) -> tuple[str, ...]:
    """Messages of a prompt, to compare between clients.

    Text of the system, ids of calls and returned reasoning are left out, as clients differ in them.
    """
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    plain = []
    for role, text in turns:
        text = re.sub(r"THINK(Two numbers|There it is)\.", "", text)
        text = re.sub(r"CALL[\w-]+?(?=\{)", "CALL", text)
        text = re.sub(r"FOR.*", "", text)
        if role != "system":
            plain.append(f"{role}:{text}")
    return tuple(plain)
