"""What the engine did, step by step: kept for a while, shown while it happens, and traced."""
