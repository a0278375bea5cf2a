"""Anthropic's Messages API: its bodies, its answers, its errors."""
