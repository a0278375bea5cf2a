"""Steps on a GPU: streams, events, pinned memory, graphs, and the two threads that drive them.

Knows plans and bytes, but no kernels and no models' insides. `device` is the contract of devices,
`step_model` that of models on them. Only `cupy_device` imports CuPy, when it is needed.
"""
