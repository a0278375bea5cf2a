# Typed where it is wrapped: aioserve/kv/ and aioserve/ops/.
from typing import Any

def __getattr__(name: str) -> Any: ...
