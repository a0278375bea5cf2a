"""What all APIs share of an answer: from what a body asks for to the pieces that are written.

    messages ──► turns ──────────────────┐
    tools, forms ──► plan, call_schemas ─┼─► answering ──► pieces ──► an API's blocks and items
    parameters ──► sampling, reasoning ──┘

`limits` says how much may be asked. Knows no API by name.
"""
