"""Parsers that separate content, reasoning and tool calls of a completion while it is written.

Know the forms in which families of models write these. Must not know tokens or requests.
"""
