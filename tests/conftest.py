"""How hypothesis runs here: without deadlines, and in CI with the same examples every time."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("developer", deadline=None)
settings.register_profile("same-every-time", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("same-every-time" if os.environ.get("CI") else "developer")
