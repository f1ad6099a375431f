"""`check()` and `dump()` of `HashBlockCache`: all invariants of its blocks, and its contents."""

from __future__ import annotations

from collections import Counter
from typing import Any

from radixserve.cache.audit import (
    Picture,
    check_owners,
    check_tokens,
    check_watches,
    dump_nodes,
    live_sequences,
)
from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.page_pool import PageAllocator


def check_blocks(allocator: PageAllocator, pool: BlockPool) -> None:
    """Raise AssertionError at the first broken invariant."""
    users = _sequences(allocator)
    blocks = {id(b): b for n in pool.namespaces.values() for b in n.blocks.values()}
    for sequence in users:
        blocks |= {id(block): block for block in _locked(sequence)}
    check_owners(allocator, [(f"block {b.block_id}", [b.page]) for b in blocks.values()])
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
    return [seq for seq in live_sequences(allocator) if isinstance(seq, HashSequence)]


def _locked(sequence: HashSequence) -> list[Block]:
    """The blocks that a sequence has locked, each as often as it has."""
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
    if block.is_listed:
        is_living = pool.namespaces.get(namespace.name) is namespace
        assert is_living, f"{name} is in a namespace that is gone"
        assert parent is None or parent.is_listed, f"{name} is found and its parent is not"
    if parent is not None and block.lock_ref:
        assert parent.lock_ref, f"{name} is locked and its parent is not"


def _check_order(pool: BlockPool) -> None:
    rank = {id(block): at for at, block in enumerate(pool.unused)}
    for block in pool.unused:
        name, at = f"block {block.block_id}", rank[id(block)]
        assert block.is_listed, f"{name} is unused and cannot be found"
        assert not block.lock_ref, f"{name} is locked and evictable"
        is_last = block.parent is None or rank.get(id(block.parent), at + 1) > at
        assert is_last, f"{name} outlives its parent"
    findable = [b for namespace in pool.namespaces.values() for b in namespace.blocks.values()]
    unused = sum(not block.lock_ref for block in findable)
    assert unused == len(pool.unused), f"{len(pool.unused)} blocks evictable, {unused} unused"


def _check_namespaces(pool: BlockPool, sequences: list[HashSequence]) -> None:
    for name, namespace in pool.namespaces.items():
        assert namespace.name == name, f"namespace {namespace.name!r} is under the name {name!r}"
        assert not namespace.is_dead, f"namespace {name!r} is dead and can be found"
        users = sum(sequence._namespace is namespace for sequence in sequences)
        assert namespace.num_sequences == users, f"namespace {name!r} miscounts its sequences"
        assert namespace.blocks or users, f"namespace {name!r} is empty"
        gone = [key for key in namespace.blocks if pool.evicted.get(key) == name]
        assert not gone, f"namespace {name!r} has a block that is remembered as evicted"


def _check_sequence(pool: BlockPool, sequence: HashSequence) -> None:
    size, name = pool.block_size, repr(sequence)
    blocks, pages, data = sequence._blocks, sequence.pages.tolist(), sequence.tokens.tobytes()
    assert len(blocks) == sequence.committed_len // size, f"{name} has not published all"
    for at, block in enumerate(blocks):
        parent = blocks[at - 1] if at else None
        assert block.parent is parent, f"{name} holds blocks that are not a chain"
        assert block.namespace is sequence._namespace, f"{name} holds a block of another namespace"
        assert block.tokens == data[at * pool.width : (at + 1) * pool.width], f"{name}: tokens"
        assert block.page == pages[at], f"{name} uses another page than its block {at}"
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


def dump_blocks(allocator: PageAllocator, pool: BlockPool, max_nodes: int) -> dict[str, Any]:
    """See `HashBlockCache.dump`."""
    users = Counter(id(b) for sequence in _sequences(allocator) for b in sequence._blocks)
    below: dict[int, list[Block]] = {}  # by the identity of their parent or of their namespace
    for namespace in pool.namespaces.values():
        for block in namespace.blocks.values():
            above = namespace if block.parent is None else block.parent
            below.setdefault(id(above), []).append(block)

    def children(node: Block | BlockNamespace) -> list[Block]:
        return below.get(id(node), [])

    def picture(node: Block | BlockNamespace) -> Picture:
        if isinstance(node, BlockNamespace):
            return Picture(b"", [], node.num_sequences, node.num_sequences)
        return Picture(node.tokens, [node.page], node.lock_ref, users[id(node)])

    roots: dict[str, Block | BlockNamespace] = dict(pool.namespaces)
    return dump_nodes(pool.block_size, roots, children, picture, max_nodes)
