"""Python runs this at its start where this directory is on its path: `aioserve._native` is then the
module that `AIOSERVE_SANITIZED` names, in this process and in those that tests start."""

import importlib.util
import os
import sys


class _Sanitized:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "aioserve._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["AIOSERVE_SANITIZED"])


# Before the finder of the editable installation.
sys.meta_path.insert(0, _Sanitized)
