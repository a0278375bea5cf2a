"""Stand-ins that only our tests use, and the soak that is made of them.

    fake_gpu         a GPU without hardware
    fake_gpu_model   a model that computes on it
    gpu_faults       faults of its launches
    simulated_host   the host's threads on a simulated loop
    soak             random requests through whole engines

Stand-ins that plugin authors use as well are in `aioserve.testing`.
"""
