"""`check()` and `dump()` of `HashBlockCache`: all invariants of its blocks, and its contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from radixserve.cache.audit import (
    NodeDump,
    check_owners,
    check_tokens,
    check_watches,
    dump_nodes,
    dump_sequences,
    usage_state,
    victim,
)
from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.namespace import is_within
from radixserve.cache.sequence import PageAllocator


def check_blocks(allocator: PageAllocator, pool: BlockPool) -> None:
    """Raise AssertionError at the first broken invariant."""
    users = _sequences(allocator)
    blocks = {id(block): block for block in _findable(pool)}
    for sequence in users:
        blocks |= {id(block): block for block in _locked(sequence)}
    published = [(f"block {block.block_id}", [block.page]) for block in blocks.values()]
    check_owners(allocator, published)
    count = len(blocks)
    assert pool.num_pages == count, f"{pool.num_pages} blocks counted, {count} found"
    locks = Counter(id(block) for sequence in users for block in _locked(sequence))
    for key, block in blocks.items():
        name = f"block {block.block_id}"
        assert block.lock_ref == locks[key], f"{name} has {block.lock_ref} locks, not {locks[key]}"
        _check_block(pool, block)
    _check_order(pool)
    _check_namespaces(pool, users)
    for sequence in users:
        check_tokens(allocator, sequence)
        _check_sequence(pool, sequence)
    check_watches(pool.watch_registry)


def _sequences(allocator: PageAllocator) -> list[HashSequence]:
    return [seq for seq in allocator.live_sequences if isinstance(seq, HashSequence)]


def _findable(pool: BlockPool) -> list[Block]:
    """Returns the blocks that look-ups can find, of all namespaces."""
    return [block for namespace in pool.namespaces.values() for block in namespace.blocks.values()]


def _locked(sequence: HashSequence) -> list[Block]:
    """Returns the blocks that a sequence has locked, each as often as it has."""
    others = (sequence._partial, sequence._source)
    return [*sequence._blocks, *(block for block in others if block is not None)]


def _check_block(pool: BlockPool, block: Block) -> None:
    name, parent, namespace = f"block {block.block_id}", block.parent, block.namespace
    is_found = namespace.blocks.get(block.key) is block
    assert block.is_listed == is_found, f"{name} is not where it says"
    assert block.lock_ref or block.is_listed, f"{name} is unlocked and cannot be found"
    if not block.key:
        assert parent is None, f"{name} has a parent and no key"
        assert not block.tokens, f"{name} has tokens and no key"
        return
    assert len(block.tokens) == pool.width, f"{name} is not a whole block"
    root_key = namespace.root_key if parent is None else parent.key
    assert block.key == pool.digest(root_key + block.tokens), f"{name} has a wrong key"
    assert (block.run is not None) == block.is_listed, f"{name} has no run, or a stale one"
    if block.run is not None:
        run, index = block.run, block.run_index
        assert run.blocks[index] is block, f"{name} is not at its place in its run"
        assert run.keys[index] == block.key, f"{name} has another key in its run"
        tokens = run.tokens[index * pool.width : (index + 1) * pool.width]
        assert tokens == block.tokens, f"{name} has other tokens in its run"
        assert index == 0 or run.blocks[index - 1] is parent, (
            f"{name} follows another one in its run"
        )
        assert run.pages[index] == block.page, f"{name} has another page in its run"
        sizes = len(run.blocks), len(run.keys), len(run.pages), len(run.tokens) / pool.width
        assert len(set(sizes)) == 1, f"{name} has a run of {sizes} blocks, keys, pages and tokens"
        assert run.blocks[-1].is_listed, f"{name} has an evicted block in its run"
    if block.is_listed:
        is_living = pool.namespaces.get(namespace.key) is namespace
        assert is_living, f"{name} is in a namespace that is gone"
        assert parent is None or parent.is_listed, f"{name} is found and its parent is not"
    if parent is not None and block.lock_ref:
        assert parent.lock_ref, f"{name} is locked and its parent is not"


def _check_order(pool: BlockPool) -> None:
    rank = {id(block): position for position, block in enumerate(pool.evictable)}
    for block in pool.evictable:
        name, position = f"block {block.block_id}", rank[id(block)]
        assert block.is_listed, f"{name} is unused and cannot be found"
        assert not block.lock_ref, f"{name} is locked and evictable"
        is_last = block.parent is None or rank.get(id(block.parent), position + 1) > position
        assert is_last, f"{name} outlives its parent"
    unused = sum(not block.lock_ref for block in _findable(pool))
    assert unused == len(pool.evictable), f"{len(pool.evictable)} blocks evictable, {unused} unused"


def _check_namespaces(pool: BlockPool, sequences: list[HashSequence]) -> None:
    for key, namespace in pool.namespaces.items():
        name = namespace.text
        assert namespace.key == key, f"namespace {name!r} is under the name {str(key)!r}"
        assert not namespace.is_dead, f"namespace {name!r} is dead and can be found"
        users = sum(sequence._namespace is namespace for sequence in sequences)
        assert namespace.num_sequences == users, f"namespace {name!r} miscounts its sequences"
        assert namespace.blocks or users, f"namespace {name!r} is empty"
        gone = [key for key in namespace.blocks if pool.evicted.get(key) == namespace.key]
        assert not gone, f"namespace {name!r} has a block that is remembered as evicted"


def _check_sequence(pool: BlockPool, sequence: HashSequence) -> None:
    size, name = pool.block_size, repr(sequence)
    blocks, pages, data = sequence._blocks, sequence.pages.tolist(), sequence.tokens.tobytes()
    assert len(blocks) == sequence.committed_len // size, f"{name} has not published all"
    for index, block in enumerate(blocks):
        parent = blocks[index - 1] if index else None
        assert block.parent is parent, f"{name} has blocks that are not a chain"
        assert block.namespace is sequence._namespace, f"{name} has a block of another namespace"
        assert block.tokens == data[index * pool.width : (index + 1) * pool.width], (
            f"{name}: tokens"
        )
        assert block.page == pages[index], f"{name} uses another page than its block {index}"
    partial, source = sequence._partial, sequence._source
    shared = len(pages) - sequence.num_private
    assert shared == len(blocks) + (partial is not None), f"{name} miscounts its shared pages"
    if partial is not None:
        assert not partial.key, f"{name} shares a page prefix that is a whole block"
        assert partial.page == pages[len(blocks)], f"{name} shares a foreign page"
    assert len(sequence.cow_copies) == (source is not None), f"{name} does not protect its copy"
    if source is not None:
        extra = sequence.committed_len % size
        wanted = (source.page, pages[len(blocks)], extra)
        assert extra, f"{name} copies nothing"
        assert sequence.cow_copies == [wanted], f"{name} copies {sequence.cow_copies}, not {wanted}"
        assert partial is None, f"{name} shares a page prefix that it has not copied yet"


def count_shared(allocator: PageAllocator) -> int:
    """Blocks that two or more sequences have locked. O(locked blocks)."""
    locked = (block for sequence in _sequences(allocator) for block in _locked(sequence))
    return len({id(block) for block in locked if block.lock_ref > 1})


def preview_blocks(pool: BlockPool, count: int) -> list[dict[str, Any]]:
    """See `PrefixCache.eviction_preview`. O(count * depth)."""
    victims = []
    for block, last_use in islice(_last_uses(pool), count):
        start, above = 0, block.parent
        while above is not None:
            start, above = start + pool.block_size, above.parent
        name, idle_s = block.namespace.text, pool.now - last_use
        victims.append(victim(name, start, block.tokens, 1, idle_s, "least recently used"))
    return victims


def _last_uses(pool: BlockPool) -> Iterator[tuple[Block, float]]:
    """Yields the unused blocks in the order of eviction, with the time of their last use.

    A release notes the time in its last block only: it is that of the blocks before it, too."""
    latest: dict[int, float] = {}  # by the identity of a block: of those after it
    for block in pool.evictable:
        last_use = max(block.last_use, latest.pop(id(block), 0.0))
        if block.parent is not None:
            above = id(block.parent)
            latest[above] = max(last_use, latest.get(above, 0.0))
        yield block, last_use


def dump_blocks(
    allocator: PageAllocator, pool: BlockPool, max_nodes: int, only: str | None
) -> dict[str, Any]:
    """See `PrefixCache.dump`: the findable blocks, each below the one before it."""
    sequences = _sequences(allocator)
    users = Counter(id(block) for sequence in sequences for block in sequence._blocks)
    last_uses = {id(block): last_use for block, last_use in _last_uses(pool)}
    below: dict[int, list[Block]] = {}  # by the identity of their parent or of their namespace
    for namespace in pool.namespaces.values():
        for block in namespace.blocks.values():
            above = namespace if block.parent is None else block.parent
            below.setdefault(id(above), []).append(block)

    def children(node: Block | BlockNamespace) -> list[Block]:
        return below.get(id(node), [])

    def describe(node: Block | BlockNamespace) -> NodeDump:
        if isinstance(node, BlockNamespace):
            count = node.num_sequences
            state = usage_state(count) if count else "cached"
            return NodeDump(b"", [], count, count, state, None)
        count, last_use = users[id(node)], last_uses.get(id(node))
        state = usage_state(count) if node.lock_ref else "cached"
        return NodeDump(node.tokens, [node.page], node.lock_ref, count, state, last_use)

    roots: dict[str, Block | BlockNamespace] = {
        space.text: space for space in pool.namespaces.values() if is_within(space.key, only)
    }
    tokens = {id(block): pool.block_size for block in _findable(pool)}
    tokens |= {id(block): pool.block_size for seq in sequences for block in seq._blocks}
    for seq in sequences:  # a page with only its first tokens, shared by forks
        if seq._partial is not None:
            filled = min(seq.length - len(seq._blocks) * pool.block_size, pool.block_size)
            tokens[id(seq._partial)] = max(filled, tokens.get(id(seq._partial), 0))
    sizes = ((1, filled) for filled in tokens.values())
    return {
        **dump_nodes(pool.block_size, roots, children, describe, max_nodes),
        **dump_sequences(allocator, sizes, only),
    }
