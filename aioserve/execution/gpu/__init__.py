"""Steps on a GPU: streams, events, pinned memory, graphs, and the two threads that drive them.

Knows plans and bytes; knows no kernels and no models' insides. `device` says what a device is,
`step_model` what computes a step on it. CuPy is imported in `cupy_device` alone, when it is asked
for.
"""
