"""Endpoints of Ollama's API, for programs that know no other: one module each, and their common
parts."""
