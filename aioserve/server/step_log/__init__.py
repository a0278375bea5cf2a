"""Record of the engine's steps: kept for a while, shown while they happen, and traced."""
