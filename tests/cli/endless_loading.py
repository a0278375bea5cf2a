"""`python -m tests.cli.endless_loading VERB ...`: the `aioserve` command with endless loading.

It never finishes reading the weights of its model.
"""

from __future__ import annotations

import time
from unittest.mock import patch


def endless(*_: object) -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    from aioserve.cli import main
    from aioserve.execution.loading.read import ModelReader

    with patch.object(ModelReader, "read_weights", endless):
        main()
