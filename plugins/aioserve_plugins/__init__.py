"""The scheduling policies and drafters that come with aioserve, one file each.

They are plugins like any other: found by entry point, written against `aioserve`'s public names.
"""
