"""Small arrays of the host on their way to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["upload"]


def upload(
    array: Sequence[float] | npt.NDArray[np.generic], dtype: npt.DTypeLike, device: torch.device
) -> Tensor:
    """Return a copy of `array` as `dtype`, made in the order of the current stream.

    A copy from pageable memory would wait for everything that the stream has to do before. Pinned
    memory is kept by torch until the copy from it is done.
    """
    host = torch.from_numpy(np.array(array, dtype))
    if device.type == "cuda" and len(host):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
