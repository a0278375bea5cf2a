"""Scheduling policies from papers, one file each, written against `aioserve`'s public names.

They are for comparison: each follows the idea of its paper, and nothing beyond it.
"""
