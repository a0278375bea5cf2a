"""A scheduler's state as plain values, for dumps."""

from __future__ import annotations

from typing import Any

from aioserve.kv.memory import KVMemory
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import SequenceState

__all__ = ["describe"]


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """Describe the prefix tree and every sequence."""
    memory = scheduler.memory
    return {
        "prefix_tree": _describe_tree(memory),
        "sequences": [
            _describe_sequence(sequence, memory) for sequence in scheduler.state.sequences.values()
        ],
    }


def _describe_tree(memory: KVMemory) -> dict[str, int] | None:
    tree = memory.tree
    if tree is None:
        return None
    return {
        "pages": tree.num_pages,
        "evictable_pages": tree.num_evictable,
        "locked_pages": tree.num_locked,
        "host_pages": sum([tree.num_pages_in(tier) for tier in range(1, len(memory.tiers))]),
        "nodes": tree.num_nodes,
        "receipts": tree.num_receipts,
    }


def _describe_sequence(sequence: SequenceState, memory: KVMemory) -> dict[str, Any]:
    request, lease = sequence.request, sequence.lease
    pages = lease.page_ids
    return {
        "request_id": request.request_id,
        "sequence_id": sequence.sequence_id,
        "seed": sequence.seed,
        "phase": sequence.phase.value,
        "paused": sequence.paused,
        "prompt_tokens": sequence.prompt_tokens,
        "known_tokens": sequence.num_known,
        "computed_tokens": lease.computed,
        "cached_tokens": lease.cached,
        "max_length": sequence.max_length,
        "pages": pages.tolist(),
        "shared_pages": len(pages) - memory.pool.num_unshared(pages),
        "published_pages": lease.published,
        "pages_on_host": 0 if lease.swapped is None else len(lease.swapped.groups[0].page_ids),
        "preemptions": sequence.epoch,
    }
