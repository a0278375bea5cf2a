"""Attacks every door for a while, with values that nobody has tried yet.

    python -m tests.attacks [--max-seconds 600] [--seed N] [pytest arguments]

Runs the tests named `test_fuzz_*` of this folder in rounds, each with a seed of its own, until the
time is up or one fails. A failing round prints its seed, with which `--seed` repeats it alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("--max-seconds", type=float, default=600, help="0: one round")
    parser.add_argument("--seed", type=int, help="of one single round")
    options, more = parser.parse_known_args()
    ends = time.monotonic() + options.max_seconds
    rounds = 0
    while True:
        seed = random.randrange(2**32) if options.seed is None else options.seed
        print(f"round {rounds}, seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "test_fuzz", str(FOLDER)]
        environment = os.environ | {"AIOSERVE_FUZZ": "1"}
        code = subprocess.call([*command, f"--hypothesis-seed={seed}", *more], env=environment)
        rounds += 1
        if code:
            print(f"failed; once more: python -m tests.attacks --seed {seed}", flush=True)
            return code
        if options.seed is not None or time.monotonic() >= ends:
            print(f"{rounds} rounds, nothing found", flush=True)
            return 0


if __name__ == "__main__":
    sys.exit(main())
