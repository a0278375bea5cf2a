"""The options of all verbs that open an engine that say where it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from aioserve.errors import ConfigError
from aioserve.isolation import shown

__all__ = ["DeviceOptions"]

SIZES = re.compile(r"[0-9]{1,20}(,[0-9]{1,20})*")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Where the model runs."""

    device: str = "auto"
    """cpu; cuda, an NVIDIA GPU, or cuda:1, the second one; auto: the first GPU that can be used,
    else the CPU."""
    graph_sizes: str | None = None
    """On a GPU: numbers of sequences at which decodes are captured as CUDA graphs, as 1,2,4; none
    for no graphs."""
    capture_graphs: Annotated[bool, Parameter(negative="--no-capture-graphs")] = True
    """On a GPU: capture them at the start, or each when it is first needed."""

    def of_engine(self) -> dict[str, Any]:
        """Options of `Engine`, which checks them. Raises `ConfigError` for sizes that are none."""
        return {
            "device": self.device,
            "graph_sizes": _sizes(self.graph_sizes),
            "capture_graphs": self.capture_graphs,
        }


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "none":
        return ()
    if not SIZES.fullmatch(text):
        raise ConfigError(
            f"graph_sizes must be whole numbers with commas between them, such as 1,2,4, or none; "
            f"got {shown(text)}",
            argument="graph_sizes",
            value=text,
        )
    return tuple(map(int, text.split(",")))
