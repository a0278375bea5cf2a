"""The chat template of a `FakeModel` with answers: ChatML, with calls as Hermes writes them."""

from __future__ import annotations

from aioserve.text.chat_template import ChatTemplate

__all__ = ["chat_template"]

_SOURCE = """\
{%- if tools %}<|im_start|>system
These tools may be called, as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def chat_template() -> ChatTemplate:
    """Return the compiled template."""
    return ChatTemplate(_SOURCE, origin="FakeModel")
