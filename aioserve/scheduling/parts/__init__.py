"""Parts of a step: each thing that its rows may be asked for, in a file of its own.

The contract is in `base.py`, the list in `table.py`. A new part is a file here and an entry there.
"""
