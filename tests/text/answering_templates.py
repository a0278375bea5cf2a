"""Small chat templates that treat calls of tools as published ones do: each takes other forms."""

from __future__ import annotations

__all__ = ["TEMPLATES"]

_HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
_TAIL = "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def _calls(arguments: str) -> str:
    """A part of a template that writes calls, with these expressions of their arguments `a`."""
    begun = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    return begun + "[{{ c.function.name }} " + arguments + "]{% endfor %}"


_JSON = _calls("{{ a | tojson }}")
_AS_WRITTEN = _calls("{{ a if a is string else a | tojson }}")
_JOINED = _calls("{{ '(' + a + ')' }}")
_MEMBERS = _calls("{% for name, value in a.items() %}{{ name }}={{ value | tojson }} {% endfor %}")
_THINKING = (
    "{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ content }}"
)

TEMPLATES: dict[str, str] = {
    name: _HEAD + body + _TAIL
    for name, body in {
        # as Hermes, Llama 3
        "looks whether there is text": "{% if m.content %}{{ m.content }}{% endif %}" + _JSON,
        # as Qwen3, QwQ
        "looks for reasoning in text": _THINKING + _AS_WRITTEN,
        # as Devstral
        "joins the text": "{{ 'text: ' + m.content }}" + _JSON,
        "writes the text": "{{ m.content }}" + _AS_WRITTEN,
        # as DeepSeek R1
        "looks for calls without text": (
            "{% if m.role == 'assistant' and m.content is none %}"
            + _JOINED
            + "{% else %}{{ m.content }}{% endif %}"
        ),
        # as Functionary
        "joins the arguments": "{{ m.content or '' }}" + _JOINED,
        # as Qwen3-Coder, GLM
        "goes through the arguments": "{{ m.content or '' }}" + _MEMBERS,
        "goes through them and joins": "{{ '' + m.content }}" + _MEMBERS,
        "refuses": (
            "{% if m.content is not string %}{{ raise_exception('no text') }}{% endif %}"
            "{{ m.content }}" + _JSON
        ),
    }.items()
}
"""Templates by what they do."""
