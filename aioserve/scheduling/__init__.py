"""What runs next: the policy interface and the scheduler that asks it.

Synchronous and pure: no torch, no clock (time is passed in), no I/O. Everything here runs in the
simulator unchanged.
"""
