"""`python -m tests.cli.slow_steps VERB ...`: the `aioserve` command with slow steps.

Steps are slow while the file in an environment variable exists. So an answer doesn't end before a
test lets it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

SLOW_FILE = "SLOW_STEPS_FILE"
"""Environment variable with the path of the file."""
SLOW_SECONDS = 0.2

if __name__ == "__main__":
    from aioserve.cli import main
    from aioserve.execution.host import Host

    slow, step = Path(os.environ[SLOW_FILE]), Host.step

    def slowly(*given: Any) -> Any:
        if slow.exists():
            time.sleep(SLOW_SECONDS)
        return step(*given)

    with patch.object(Host, "step", slowly):
        main()
