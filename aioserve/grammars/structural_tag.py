"""Structured output that is free up to a trigger, and has a form from there to the form's end.

    Let me see. <function=weather>{"city": "Oslo"}</function> That is all.
    free        │ begin           │ of the schema  │ end     │ free

Free text has no trigger in it, so an answer is read in one way. Special tokens are no text, so they
are nowhere in it.
"""

from __future__ import annotations

import json

import msgspec

from aioserve.grammars.schema import json_rule
from aioserve.structured_output import StructuralTag, StructuredOutput

__all__ = ["structural_tag_source"]


def structural_tag_source(output: StructuredOutput) -> str:
    """Return the grammar of `output.structural_tag`, as llguidance takes it.

    Raises `ValueError` for a schema that nothing fits, and `InvalidSamplingError`.
    """
    tag = msgspec.json.decode(str(output.structural_tag), type=StructuralTag)
    triggers = list(dict.fromkeys(tag.triggers))
    lines = ["ANY: /(?s:.*)/", f"TEXT: {_without(triggers)}"]
    # A trigger that no structure begins with can't go on: no answer has it, even if another begins
    # within it.
    begun = [one for one in triggers if any(s.begin.startswith(one) for s in tag.structures)]
    never = [one for one in triggers if one not in begun]
    held: list[str] = []
    for number, trigger in enumerate(begun):
        rests: list[str] = []
        for index, one in enumerate(tag.structures):
            if one.begin.startswith(trigger):
                begin = one.begin.removeprefix(trigger)
                rest = f"{json.dumps(begin)} " if begin else ""
                rests.append(f"{rest}schema{index} {json.dumps(one.end)}")
        up_to = f"TEXT {json.dumps(trigger)}"
        if never:
            lines.append(f"UP_TO{number}: ({up_to}) & {_without(never)}")
            up_to = f"UP_TO{number}"
        lines.append(f"up_to{number}[lazy]: {up_to}")
        held.append(f"up_to{number} ({' | '.join(rests)})")
    for index, one in enumerate(tag.structures):
        schema = json.dumps({} if one.schema is None else one.schema)
        lines.append(json_rule(f"schema{index}", schema, "structural_tag", output.whitespace))
    lines.append(f"structure: {' | '.join(held)}")
    times = "+" if tag.at_least_one else "*"
    return "\n".join([f"start: structure{times} TEXT", *lines]) + "\n"


def _without(marks: list[str]) -> str:
    return f"ANY & ~(ANY ({' | '.join(map(json.dumps, marks))}) ANY)"
