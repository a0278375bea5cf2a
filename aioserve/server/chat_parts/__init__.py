"""Parts of a chat completion that all APIs share: from the fields of a body to the pieces written.

    messages ──► turns ─────────────────────┐
    tools, structured output ──► plan ──────┼─► answering ──► pieces ──► an API's blocks and items
    parameters, effort ──► sampling ────────┘

Knows no API by name.
"""
