"""Ops for NVIDIA GPUs, in Triton.

Nothing outside this folder imports it before a CUDA device is chosen, because only the CUDA extras
install Triton. All launches take their sizes from the host; no op reads a value from the device.
"""
