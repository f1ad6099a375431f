"""`check()` and `dump()` of `HashBlockCache`: every law of its blocks, and a picture of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from radixserve.cache.hash.block import Block
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.hash.sequence import HashSequence


def check_pool(pool: BlockPool) -> None:
    """Raise AssertionError at the first broken law."""
    blocks = _all_blocks(pool)
    _check_owners(pool, blocks)
    _check_locks(pool, blocks)
    for block in blocks:
        _check_block(pool, block)
    _check_order(pool)
    _check_namespaces(pool)
    for sequence in sequences(pool):
        _check_sequence(pool, sequence)


def sequences(pool: BlockPool) -> list[HashSequence]:
    return [sequence for sequence in pool.live_sequences if isinstance(sequence, HashSequence)]


def _held(sequence: HashSequence) -> list[Block]:
    """The blocks that a sequence has locked, each as often as it has."""
    others = (sequence._partial, sequence._source)
    return [*sequence._blocks, *(block for block in others if block is not None)]


def _all_blocks(pool: BlockPool) -> list[Block]:
    """Findable ones, and those that only sequences still hold."""
    found = {id(b): b for namespace in pool.namespaces.values() for b in namespace.blocks.values()}
    for sequence in sequences(pool):
        found |= {id(block): block for block in _held(sequence)}
    return list(found.values())


def _check_owners(pool: BlockPool, blocks: list[Block]) -> None:
    owner: dict[int, str] = {}
    session_refs = [(page, "the free list") for page in pool.pages.free_ids()]
    session_refs += [(block.page, f"block {block.block_id}") for block in blocks]
    for sequence in sequences(pool):
        own = sequence.pages[sequence._num_shared :].tolist()
        session_refs += [(page, repr(sequence)) for page in own]
    for page, name in session_refs:
        assert 0 <= page < pool.pages.num_pages, f"{name} has page {page}, which does not exist"
        assert page not in owner, f"page {page} belongs to {owner[page]} and to {name}"
        owner[page] = name
    lost = [page for page in range(pool.pages.num_pages) if page not in owner]
    assert not lost, f"pages {lost[:8]} belong to nobody ({len(lost)} in all)"
    assert pool.num_blocks == len(blocks), f"{pool.num_blocks} blocks counted, {len(blocks)} found"
    assert pool.num_private == sum(s.num_private for s in sequences(pool)), "private miscounted"


def _check_locks(pool: BlockPool, blocks: list[Block]) -> None:
    held: dict[int, int] = {}
    for sequence in sequences(pool):
        for block in _held(sequence):
            held[id(block)] = held.get(id(block), 0) + 1
    for block in blocks:
        wanted = held.get(id(block), 0)
        assert block.lock_ref == wanted, (
            f"block {block.block_id} has {block.lock_ref} locks, not {wanted}"
        )


def _check_block(pool: BlockPool, block: Block) -> None:
    name, parent, namespace = f"block {block.block_id}", block.parent, block.namespace
    is_found = namespace.blocks.get(block.key) is block
    assert block.is_listed == is_found, f"{name} is not where it says"
    assert block.lock_ref or block.is_listed, f"{name} is of no use to anybody"
    if not block.key:
        assert parent is None, f"{name} has a parent and no key"
        assert not block.tokens, f"{name} has tokens and no key"
        return
    assert len(block.tokens) == pool.width, f"{name} is not a whole block"
    root_key = namespace.root_key if parent is None else parent.key
    assert block.key == pool._digest(root_key + block.tokens), f"{name} has a wrong key"
    if block.is_listed:
        assert pool.namespaces.get(namespace.name) is namespace, (
            f"{name} is in a namespace that is gone"
        )
        assert parent is None or parent.is_listed, f"{name} is found and its parent is not"
    if parent is not None and block.lock_ref:
        assert parent.lock_ref, f"{name} is held and its parent is not"


def _check_order(pool: BlockPool) -> None:
    rank = {id(block): at for at, block in enumerate(pool.unused)}
    for block in pool.unused:
        assert block.is_listed, f"block {block.block_id} is unused and cannot be found"
        assert not block.lock_ref, f"block {block.block_id} is held and evictable"
        at = rank[id(block)]
        assert block.parent is None or rank.get(id(block.parent), at + 1) > at, (
            f"block {block.block_id} outlives its parent"
        )
    findable = [b for namespace in pool.namespaces.values() for b in namespace.blocks.values()]
    unused = sum(not block.lock_ref for block in findable)
    assert unused == len(pool.unused), f"{len(pool.unused)} blocks evictable, {unused} unused"


def _check_namespaces(pool: BlockPool) -> None:
    for name, namespace in pool.namespaces.items():
        assert namespace.name == name, f"namespace {namespace.name!r} is under the name {name!r}"
        assert not namespace.is_dead, f"namespace {name!r} is dead and can be found"
        users = sum(sequence._namespace is namespace for sequence in sequences(pool))
        assert namespace.num_sequences == users, f"namespace {name!r} miscounts its sequences"
        assert namespace.blocks or users, f"namespace {name!r} is empty"
        gone = [key for key in namespace.blocks if pool.evicted.find(key) == name]
        assert not gone, f"namespace {name!r} has a block that is remembered as evicted"


def _check_sequence(pool: BlockPool, sequence: HashSequence) -> None:
    size, name = pool.block_size, repr(sequence)
    blocks, pages = sequence._blocks, sequence.pages.tolist()
    assert not sequence.is_released, f"{name} is registered after its release"
    assert len(pages) == pool.pages_for(sequence.length), f"{name} has wrong pages"
    known = sequence.length - sequence.num_unknown
    assert sequence.committed_len <= known, f"{name} has committed too much"
    assert (sequence.tokens[known:] == -1).all(), f"{name} knows what it calls unknown"
    assert len(blocks) == sequence.committed_len // size, f"{name} has not published all"
    data = sequence.tokens.tobytes()
    for at, block in enumerate(blocks):
        parent = blocks[at - 1] if at else None
        assert block.parent is parent, f"{name} holds blocks that are not a chain"
        assert block.namespace is sequence._namespace, f"{name} holds a block of another namespace"
        assert block.tokens == data[at * pool.width : (at + 1) * pool.width], f"{name}: tokens"
        assert block.page == pages[at], f"{name} uses another page than its block {at}"
    if sequence._partial is not None:
        assert not sequence._partial.key, f"{name} shares a head that is a whole block"
        assert sequence._partial.page == pages[len(blocks)], f"{name} shares a foreign page"
    source = sequence._source
    assert len(sequence.cow_copies) == (source is not None), f"{name} does not protect its copy"
    if source is not None:
        head = sequence.committed_len % size
        wanted = (source.page, pages[len(blocks)], head)
        assert head, f"{name} copies nothing"
        assert sequence.cow_copies == [wanted], f"{name} copies {sequence.cow_copies}, not {wanted}"
        assert sequence._partial is None, f"{name} shares a head that it has not copied yet"


def dump_pool(pool: BlockPool, max_nodes: int) -> dict[str, Any]:
    """See `HashBlockCache.dump`."""
    num_sequences: dict[int, int] = {}
    for sequence in sequences(pool):
        for block in sequence._blocks:
            num_sequences[id(block)] = num_sequences.get(id(block), 0) + 1
    below: dict[int, list[Block]] = {}  # by the identity of their parent or of their space
    for namespace in pool.namespaces.values():
        for block in namespace.blocks.values():
            above = namespace if block.parent is None else block.parent
            below.setdefault(id(above), []).append(block)
    namespaces: dict[str, Any] = {}
    queue: deque[tuple[int, dict[str, Any]]] = deque()
    for name, namespace in sorted(pool.namespaces.items()):
        users = namespace.num_sequences
        namespaces[name] = _as_dict(0, b"", [], lock_ref=users, sequences=users)
        queue.append((id(namespace), namespaces[name]))
    count = 0
    while queue and count < max_nodes:
        above_id, picture = queue.popleft()
        start = picture["start"] + picture["num_tokens"]
        for block in below.get(above_id, [])[: max_nodes - count]:
            users = num_sequences.get(id(block), 0)
            node = _as_dict(
                start, block.tokens, [block.page], lock_ref=block.lock_ref, sequences=users
            )
            picture["children"].append(node)
            queue.append((id(block), node))
            count += 1
    return {
        "page_size": pool.block_size,
        "truncated": count < sum(len(namespace.blocks) for namespace in pool.namespaces.values()),
        "namespaces": namespaces,
    }


def _as_dict(
    start: int, tokens: bytes, pages: list[int], *, lock_ref: int, sequences: int
) -> dict[str, Any]:
    ids = np.frombuffer(tokens, np.int32).tolist()
    return {
        "start": start,
        "num_tokens": len(ids),
        "tokens": ids,
        "pages": pages,
        "lock_ref": lock_ref,
        "sequences": sequences,
        "children": [],
    }
