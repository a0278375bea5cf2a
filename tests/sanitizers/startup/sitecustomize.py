"""Import hook that makes `aioserve._native` the module that `AIOSERVE_SANITIZED` names.

Python runs this file at its start if its directory is on the path, here and in processes that tests
start.
"""

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
