"""The scheduling policies that come with aioserve, one file each.

They are plugins like anyone's: found by entry point, written against `aioserve`'s public names.
"""
