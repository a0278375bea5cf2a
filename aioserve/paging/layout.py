"""Groups of layers whose keys and values share a page, and the tokens that each group keeps.

    page of group 0    some positions of the layers with full attention    kept to the end
    page of group 1    the same positions of some window layers            kept for the window
    page of group 2    the same positions of the other window layers       kept for the window

Every page has room for `layers_per_page` layers, so that one pool serves all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from aioserve.paging.format import KVEntry

__all__ = [
    "ONE_GROUP",
    "GroupKind",
    "GroupSpec",
    "KVGroup",
    "KVLayout",
    "LayerKV",
    "first_seen",
    "group_specs",
    "kv_layout",
]

GroupKind = Literal["full", "window", "latent"]

MAX_GROUPS = 8
"""Most groups of a model with a window in every layer. Smaller pages would save little more."""
WORTHWHILE_SHARE = 0.9
"""Several groups are used only if they need at most this share of the memory of a single group.

Both are measured for a request of the longest context."""


class LayerKV(NamedTuple):
    """KV of a token in one layer."""

    entry: KVEntry
    window: int = 0
    """Number of last positions that a token attends to, its own included; 0: all."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share pages: a page holds their KV of the same positions."""

    kind: GroupKind
    layers: tuple[int, ...]
    """Indices of the model's layers, in the order of their places in a page."""
    entry: KVEntry
    """KV of one token in one of these layers, with its format."""
    window: int = 0
    """Number of last positions whose pages are kept; 0: all, as in group 0."""


class GroupSpec(NamedTuple):
    """Groups of layers whose pages KV memory takes and releases together.

    `aioserve.kv.groups` has a class for each kind."""

    kind: Literal["full", "window"]
    width: int = 1
    """Number of groups of layers: the pages behind each place of a page table."""
    window: int = 0
    """Number of last positions whose pages are kept; 0: all."""


ONE_GROUP: tuple[GroupSpec, ...] = (GroupSpec("full"),)
"""Group 0 without window groups. Latents are kept like keys and values."""


@dataclass(frozen=True)
class KVLayout:
    """Groups of a model. Group 0 keeps all positions; later groups all keep the same window.

    Raises ValueError if groups break that rule, or if a layer is missing or appears twice. Entries
    must not differ either, since kernels read all pages by one rule.
    """

    groups: tuple[KVGroup, ...]
    layers_per_page: int
    """Layers that a page has room for. A group with fewer layers leaves the end of it unused."""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ValueError(f"groups must hold each layer from 0 on once, got {layers}")
        sizes = [len(group.layers) for group in self.groups]
        if max(sizes) > self.layers_per_page or min(sizes) < 1:
            raise ValueError(
                f"a group must have 1 to {self.layers_per_page} layers, got groups of {sizes}"
            )
        windows = [group.window for group in self.groups]
        kinds = [group.kind for group in self.groups]
        behind = set(windows[1:])
        if windows[0] or len(behind) > 1 or 0 in behind or "window" in kinds[:1]:
            raise ValueError(
                "group 0 must keep all positions, and those behind it one window, "
                f"got windows {windows} of kinds {kinds}"
            )
        if any(kind != "window" for kind in kinds[1:]):
            raise ValueError(f"groups behind the first must be of kind window, got {kinds}")
        entries = dict.fromkeys(group.entry for group in self.groups)
        if len(entries) > 1:
            raise ValueError(f"groups must have one entry, got {list(entries)}")

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def num_groups(self) -> int:
        """Number of groups: the pages of `page_size` positions while these are in the window."""
        return len(self.groups)

    @property
    def num_window_groups(self) -> int:
        """Number of groups that release pages behind the window: all but the first."""
        return len(self.groups) - 1

    @property
    def window(self) -> int:
        """Number of last positions that window groups keep; 0 without window groups."""
        return self.groups[-1].window

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Window of each group."""
        return tuple(group.window for group in self.groups)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Pair (group, index in the group) of each layer."""
        places = {
            layer: (at, index)
            for at, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    @property
    def entry(self) -> KVEntry:
        """KV of one token in one layer of any group."""
        return self.groups[0].entry

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in a page of any group, unused layer places included."""
        return self.layers_per_page * self.entry.num_bytes

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of a page of any group."""
        return self.bytes_per_token * page_size


def group_specs(num_window_groups: int, window: int) -> tuple[GroupSpec, ...]:
    """Return what KV memory needs to know of a layout with `num_window_groups` window groups.

    Raises `ValueError` for a window without groups, or groups without a window.
    """
    if (window > 0) != (num_window_groups > 0) or window < 0:
        raise ValueError(
            "window must be at least 1 with num_window_groups, and 0 without, got "
            f"window={window} and num_window_groups={num_window_groups}"
        )
    if not num_window_groups:
        return ONE_GROUP
    return *ONE_GROUP, GroupSpec("window", num_window_groups, window)


def first_seen(position: int, window: int) -> int:
    """First position that a token at `position` attends to; 0 if `window` is 0."""
    return max(0, position - window + 1) if window else 0


def kv_layout(layers: Sequence[LayerKV], max_model_len: int, *, grouped: bool = True) -> KVLayout:
    """Return the layout of `layers` for contexts of up to `max_model_len` tokens.

    Layers with full attention form group 0. Layers with a window fill further groups of the same
    size. A window of at least `max_model_len` counts as full attention. If every layer has a
    window, group 0 keeps at least an eighth of the layers in full. A page holds the number of
    layers that needs the least memory for a request of the longest context, padding included. It
    holds all layers if groups would save too little, or if `grouped` is False.

    Raises ValueError if `layers` is empty, if entries differ, or for a length below 1.
    """
    if max_model_len < 1:
        raise ValueError(f"max_model_len must be at least 1, got {max_model_len}")
    if not layers:
        raise ValueError("layers must not be empty")
    entries = dict.fromkeys(layer.entry for layer in layers)
    if len(entries) > 1:
        raise ValueError(f"all layers must keep the same entry of a token, got {list(entries)}")
    windowed = [at for at, layer in enumerate(layers) if 0 < layer.window < max_model_len]
    full = [at for at in range(len(layers)) if at not in set(windowed)]
    per_page = len(layers)
    if grouped and windowed:
        window = max(layers[at].window for at in windowed)
        per_page = _layers_per_page(len(full), len(windowed), window, max_model_len)
    # Window layers fill the places of group 0 that layers with full attention leave free.
    first = sorted(full + windowed[: per_page - len(full)])
    rest = windowed[per_page - len(full) :]
    entry = layers[0].entry
    kind: GroupKind = "latent" if entry.latent else "full"
    groups = [KVGroup(kind, tuple(first), entry)]
    window = max((layers[at].window for at in rest), default=0)
    for begin in range(0, len(rest), per_page):
        members = tuple(rest[begin : begin + per_page])
        groups.append(KVGroup("window", members, entry, window))
    return KVLayout(tuple(groups), per_page)


def _layers_per_page(num_full: int, num_windowed: int, window: int, max_model_len: int) -> int:
    """Layers per page that need the least memory for a request of `max_model_len` tokens.

    A tie goes to the smaller number."""
    num_layers = num_full + num_windowed

    def tokens(per_page: int) -> int:
        """Tokens kept, summed over layers, with the unused places of pages."""
        window_groups = -(-(num_layers - per_page) // per_page)
        return per_page * (max_model_len + window_groups * window)

    least = num_full or -(-num_layers // MAX_GROUPS)
    best = min(range(least, num_layers + 1), key=tokens)
    return best if tokens(best) <= WORTHWHILE_SHARE * tokens(num_layers) else num_layers
