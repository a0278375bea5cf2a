"""Scheduling policies from papers, one file each, written against `aioserve`'s public names.

They are for comparison: each does what its paper is about, and no more.
"""
