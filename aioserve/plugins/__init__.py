"""Finds plugins and asks them what they offer. A broken plugin harms nothing that doesn't use it.

A plugin is a module named by an entry point of the group `aioserve`, or an object given to
`Engine(plugins=[...])`. Its hook implementations are marked `@aioserve.hookimpl`. An entry point
may have the name of an offer. It is then known by that name even if its module can't be imported.
"""

from __future__ import annotations

from aioserve.plugins.given_objects import (
    check_drafter_object,
    check_observer_object,
    check_policy_object,
)
from aioserve.plugins.observers import (
    Admission,
    Observer,
    Observers,
    RequestInfo,
    RequestSummary,
    StepInfo,
    StepPart,
    info_of,
)
from aioserve.plugins.registry import (
    BrokenPlugin,
    Offer,
    PluginRegistry,
)
from aioserve.plugins.specs import (
    API_VERSION,
    DrafterSpec,
    EvictionSpec,
    LogitsProcessorSpec,
    ModelFamilySpec,
    ObserverSpec,
    PolicySpec,
    ReasoningParserSpec,
    ToolParserSpec,
    WeightFormatSpec,
    hookimpl,
)

__all__ = [
    "API_VERSION",
    "Admission",
    "BrokenPlugin",
    "DrafterSpec",
    "EvictionSpec",
    "LogitsProcessorSpec",
    "ModelFamilySpec",
    "Observer",
    "ObserverSpec",
    "Observers",
    "Offer",
    "PluginRegistry",
    "PolicySpec",
    "ReasoningParserSpec",
    "RequestInfo",
    "RequestSummary",
    "StepInfo",
    "StepPart",
    "ToolParserSpec",
    "WeightFormatSpec",
    "check_drafter_object",
    "check_observer_object",
    "check_policy_object",
    "hookimpl",
    "info_of",
]
