"""Tells content, reasoning and tool calls of a completion apart while it is written.

Knows the forms in which families of models write these. Must not know tokens or requests.
"""
