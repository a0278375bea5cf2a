"""The scheduler, and the interface of the policies that it asks.

Synchronous and pure: no torch, no clock (time is passed in), no I/O. Everything here runs in the
simulator unchanged.
"""
