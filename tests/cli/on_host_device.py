"""`python -m tests.cli.on_host_device VERB ...`: the `aioserve` command on a device that is the
host, through all that a GPU goes through."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if __name__ == "__main__":
    from aioserve.cli import main
    from tests.execution.gpu.host_device import cuda_is_the_host

    with pytest.MonkeyPatch.context() as patch:
        cuda_is_the_host(patch)
        # The largest step of the default options would be interpreted for minutes.
        patch.setattr("aioserve.execution.loading.cuda.measure_step", lambda *_, **__: 1 << 20)
        main()
