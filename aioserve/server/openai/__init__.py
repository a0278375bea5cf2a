"""The OpenAI API: its bodies, its answers, its errors."""
