# The modules that wrap it have the types: see aioserve/kv/ and aioserve/ops/.
from typing import Any

def __getattr__(name: str) -> Any: ...
