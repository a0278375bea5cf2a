"""Entry point of `python -m aioserve`, the same as the `aioserve` command.

Python imports the package before it runs this file. Ctrl-C in that time leaves a traceback. The
command's own script avoids that: it begins with `aioserve_main`.
"""

from __future__ import annotations

from aioserve_main import main

if __name__ == "__main__":
    main()
