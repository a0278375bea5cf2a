"""A model that gives scripted answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import tokenizers

from aioserve.config import EngineConfig
from aioserve.execution.runner import LoadedModel
from aioserve.steps.plan import SampleRow, WorkItem
from aioserve.testing.fake_device import FakeDevice, SlotStart
from aioserve.testing.fake_model import FakeModel, FakeRunner, byte_tokenizer
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.tokenizer import Tokenizer

__all__ = ["SPECIAL", "ScriptedDevice", "ScriptedModel", "chat_tokenizer"]

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *HarmonyParser.marks,
)
END = "<|im_end|>"


def chat_tokenizer() -> Tokenizer:
    """Tokenizer of bytes, followed by special tokens."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer()._backend.to_str())
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, source="chat tokenizer")


class ScriptedDevice(FakeDevice):
    """Gives the tokens of answer `i` to the sample of seed `i`."""

    def __init__(self, answers: Sequence[Sequence[int]], *shape: int) -> None:
        super().__init__(*shape)
        self._answers = answers
        self._numbers: dict[int, int] = {}
        """Number of the answer of each seed. A preempted sequence may begin again in the middle
        of its answer."""

    def answer_of(self, item: WorkItem, row: SampleRow, start: SlotStart) -> int:
        """Choose the number of an answer that begins."""
        return start.seed % len(self._answers)

    def _drawn(self, total: int, item: WorkItem, row: SampleRow, start: SlotStart) -> int:
        count = item.start + row.offset + 1 - start.prompt_tokens
        if count <= 0:
            self._numbers[start.seed] = self.answer_of(item, row, start)
        answer = self._answers[self._numbers[start.seed]]
        return answer[min(count, len(answer) - 1)]


class ScriptedModel(FakeModel):
    """`answers` are texts with special tokens written out. Each ends by itself. The seed of a
    request chooses its answer."""

    device: type[ScriptedDevice] = ScriptedDevice

    def __init__(self, template: str, *answers: str, **options: Any) -> None:
        super().__init__(**{"num_pages": 256, "max_model_len": 2048, **options})
        self.tokenizer = chat_tokenizer()
        self.template = ChatTemplate(template, origin="test")
        self.answers = [self.tokenizer.encode(answer + END) for answer in answers]

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await super().load(config, num_slots=num_slots)
        num_pages = loaded.limits.num_pages
        shape = (num_pages, config.page_size, num_slots, config.num_host_pages)
        device = self.device(self.answers, *shape)
        limits = msgspec.structs.replace(
            loaded.limits,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=frozenset(self.tokenizer.encode(END)),
        )
        return msgspec.structs.replace(
            loaded,
            name="scripted",
            runner=FakeRunner(device, self),
            limits=limits,
            tokenizer=self.tokenizer,
            chat_template=self.template,
        )
