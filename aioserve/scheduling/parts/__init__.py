"""The parts of a step: each thing that its rows may be asked for, in a file of its own.

`base.py` has the contract, and `table.py` the list. A new one is a file here and an entry there.
"""
