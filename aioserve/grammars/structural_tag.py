"""Structured output that is free up to a trigger, and of a form from there to the form's end.

    Let me see. <function=weather>{"city": "Oslo"}</function> That is all.
    free        │ begin           │ of the schema  │ end     │ free

What is free has no trigger in it: an answer is read in one way. Special tokens are no text, and so
are nowhere in it.
"""

from __future__ import annotations

import json

import msgspec

from aioserve.grammars.schema import json_rule
from aioserve.structured_output import StructuralTag, StructuredOutput

__all__ = ["structural_tag_source"]


def structural_tag_source(output: StructuredOutput) -> str:
    """The grammar of `output.structural_tag`, as llguidance takes it. Raises `ValueError` for a
    schema that nothing fits, and `InvalidSamplingError`."""
    tag = msgspec.json.decode(str(output.structural_tag), type=StructuralTag)
    triggers = list(dict.fromkeys(tag.triggers))
    either = " | ".join(map(json.dumps, triggers))
    lines = ["ANY: /(?s:.*)/", f"TEXT: ANY & ~(ANY ({either}) ANY)"]
    held: list[str] = []
    for number, trigger in enumerate(triggers):
        rests: list[str] = []
        for index, one in enumerate(tag.structures):
            if one.begin.startswith(trigger):
                begin = one.begin.removeprefix(trigger)
                rest = f"{json.dumps(begin)} " if begin else ""
                rests.append(f"{rest}schema{index} {json.dumps(one.end)}")
        # Of a trigger that no structure begins with there is nothing to go on with.
        if rests:
            lines.append(f"up_to{number}[lazy]: TEXT {json.dumps(trigger)}")
            held.append(f"up_to{number} ({' | '.join(rests)})")
    for index, one in enumerate(tag.structures):
        schema = json.dumps({} if one.schema is None else one.schema)
        lines.append(json_rule(f"schema{index}", schema, "structural_tag", output.whitespace))
    lines.append(f"structure: {' | '.join(held)}")
    times = "+" if tag.at_least_one else "*"
    return "\n".join([f"start: structure{times} TEXT", *lines]) + "\n"
