"""What all APIs share of a chat completion: from what a body asks for to the pieces written.

    messages ──► turns ─────────────────────┐
    tools, structured output ──► plan ──────┼─► answering ──► pieces ──► an API's blocks and items
    parameters, effort ──► sampling ────────┘

Knows no API by name.
"""
