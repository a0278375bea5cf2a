"""`python -m aioserve`: the same as the `aioserve` command."""

from __future__ import annotations

from aioserve.cli import main

if __name__ == "__main__":
    main()
