"""Stand-ins that our tests alone use, and the soak that is made of them.

What plugin authors use as well is in `aioserve.testing`. Here are a GPU without one (`fake_gpu`), a
model that computes on it (`fake_gpu_model`), what can go wrong with a launch (`gpu_faults`), the
host's threads on a simulated loop (`simulated_host`), and random requests through whole engines
(`soak`).
"""
