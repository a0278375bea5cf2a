"""What an answer is made of: content, reasoning, tool calls; told apart while it is written.

Knows the forms in which families of models write these. Must not know tokens or requests.
"""
