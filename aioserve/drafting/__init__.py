"""Draft tokens for sequences, which a step verifies together. Knows token ids and slots; must not
know requests, plans or the scheduler."""
