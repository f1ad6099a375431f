"""`snapshot` of `HashBlockCache`: runs of blocks as nodes, and every page's owner."""

from __future__ import annotations

from itertools import islice
from typing import Any

from radixserve.cache.audit import usage_state
from radixserve.cache.hash.audit import preview_blocks
from radixserve.cache.hash.block import BlockRun
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.sequence import PageAllocator
from radixserve.cache.snapshot import (
    HEAD_TOKENS,
    TREE,
    PageMap,
    SnapshotView,
    edge_tokens,
    page_runs,
    private_size,
    unused_slots,
)

_SCANNED = 4096  # blocks of a namespace that are looked at, the newest ones
_MAX_NAMESPACES = 64


def snapshot_blocks(
    allocator: PageAllocator, pool: BlockPool, view: SnapshotView
) -> dict[str, Any]:
    """See `PrefixCache.snapshot`. A node is a run of blocks; its parent is the run that it leaves,
    maybe in the middle: see its start."""
    pages = PageMap(allocator.pool, view)
    spaces = [space for key, space in pool.namespaces.items() if view.shows(key)]
    shown: dict[int, BlockRun] = {}  # by the id of its first block
    for space in islice(spaces, _MAX_NAMESPACES):
        for block in islice(reversed(space.blocks.values()), _SCANNED):
            _show(block.run, shown, view.max_nodes)
    starts: dict[int, int] = {}
    nodes = [_run_record(run, starts, pool) for run in shown.values()]
    sequences = [seq for seq in allocator.live_sequences if view.shows(seq.namespace)]
    if view.within is not None:
        for run in shown.values():
            pages.mark(run.pages, TREE)
    for sequence in sequences:
        pages.mark_sequence(sequence)
    sizes = [(len(run.pages), len(run.pages) * pool.block_size) for run in shown.values()]
    sizes += [private_size(seq, pool.block_size) for seq in sequences]
    return {
        "page_size": pool.block_size,
        "namespaces": [
            {
                "name": space.text,
                "num_pages": len(space.blocks),
                "num_locked": None,
                "num_children": None,
            }
            for space in spaces[:_MAX_NAMESPACES]
        ],
        "nodes": nodes,
        "pages": {**pages.report(), "private": sum(seq.num_private for seq in sequences)},
        "fragmentation": unused_slots(sizes, pool.block_size),
        "victims": [] if view.within is not None else _victims(pool, view.max_victims),
    }


def _show(run: BlockRun | None, shown: dict[int, BlockRun], limit: int) -> None:
    """`run` and those above it, parents first, where all of them fit."""
    chain: list[BlockRun] = []
    while run is not None and run.blocks[0].block_id not in shown:
        chain.append(run)
        parent = run.blocks[0].parent
        run = None if parent is None else parent.run
    if len(shown) + len(chain) <= limit:
        shown |= {above.blocks[0].block_id: above for above in reversed(chain)}


def _run_record(run: BlockRun, starts: dict[int, int], pool: BlockPool) -> dict[str, Any]:
    """`starts`: position of each run before it, by the id of its first block."""
    first, last = run.blocks[0], run.blocks[-1]
    parent = first.parent
    above = None if parent is None or parent.run is None else parent.run.blocks[0].block_id
    start = 0
    if above is not None and parent is not None:
        start = starts[above] + (parent.run_index + 1) * pool.block_size
    starts[first.block_id] = start
    users = first.lock_ref
    return {
        "id": first.block_id,
        "parent": above,
        "namespace": first.namespace.text,
        "start": start,
        **edge_tokens(run.tokens),
        "num_pages": len(run.pages),
        "pages": page_runs(run.pages),
        "lock_ref": users,
        "sequences": users,
        "state": usage_state(users) if users else "cached",
        "idle_s": None if users else max(0.0, pool.now - last.last_use),
        "sessions": [],
        "num_sessions": 0,
        "num_children": 0,
    }


def _victims(pool: BlockPool, count: int) -> list[dict[str, Any]]:
    victims = preview_blocks(pool, count)
    for shown_victim in victims:
        tokens = shown_victim.pop("tokens")
        shown_victim |= {"id": None, "head": tokens[:HEAD_TOKENS], "tail": [], "pages": []}
    return victims
