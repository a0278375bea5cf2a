"""Ops for NVIDIA GPUs, in Triton.

Nothing outside this folder imports it until a CUDA device was chosen: Triton comes with the extras
for CUDA alone. All launches take their sizes from the host; no op reads a value from the device.
"""
