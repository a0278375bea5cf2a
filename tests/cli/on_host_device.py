"""`python -m tests.cli.on_host_device VERB ...`: the `aioserve` command with the host as its GPU.

The device goes through all that a real GPU goes through.
"""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if __name__ == "__main__":
    from aioserve.cli import main
    from tests.execution.gpu.host_device import cuda_is_the_host

    with pytest.MonkeyPatch.context() as patch:
        cuda_is_the_host(patch)
        # The largest step of the default options would take minutes in the interpreter.
        patch.setattr("aioserve.execution.loading.cuda.measure_step", lambda *_, **__: 1 << 20)
        main()
