"""Anthropic's Messages API: bodies, answers and errors."""
