"""Case F: bytes that a cache keeps for each token and each node, everything released.

Python's memory is counted by tracemalloc from before the cache is made, so that ours contains its
free list, its counters and its memory of evictions. Torch tensors are not seen by it: the storages
of those that a peer's nodes hold are added. A peer in a compiled language is counted by what malloc
has handed out (mallinfo2), with tracemalloc off. The pools of peers are left out, in their favour.
"""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from cache.cases import LEAF, TURN, Bench, serve
from cache.contenders import Contender, Tree
from cache.timing import Figure, figures

from radixserve.arrays import IntArray


def footprint(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    said = bench.tokens(sizes.sessions, sizes.turns * TURN)
    leaves = min(10_000, sizes.leaves[-1])
    rows = bench.tokens(leaves, LEAF, vocab=2**31 - 1)
    turns = [row[:length] for length in range(TURN, said.shape[1] + 1, TURN) for row in said]
    for contender in bench.contenders:
        yield from _kept(contender, "chat", f"{sizes.sessions} chats of C", said, turns)
        if leaves <= contender.max_leaves:
            yield from _kept(contender, "leaves", f"{leaves:,} leaves of E", rows, rows)


def _kept(
    contender: Contender, name: str, what: str, branches: IntArray, prompts: Iterable[IntArray]
) -> Iterator[Figure]:
    """Serving the `prompts` puts the `branches` into the cache."""
    measure = _native_bytes if contender.is_native else _python_bytes
    tree, size = measure(lambda: contender.tree(*map(len, branches)), prompts)
    held = sum(tree.lookup(tree.prompt(np.append(row, row[:1]))) for row in branches)
    for unit, count in (("token", held), ("node", tree.num_nodes())):
        if count:
            each = {contender.name: [size / count]}
            yield from figures(f"F.{name}.{unit}", f"a {unit}, {what}", each, "bytes")


def _python_bytes(make: Callable[[], Tree], prompts: Iterable[IntArray]) -> tuple[Tree, int]:
    gc.collect()
    tracemalloc.start()
    tree = make()
    serve(tree, prompts)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tree, size + tree.hidden_bytes()


def _native_bytes(make: Callable[[], Tree], prompts: Iterable[IntArray]) -> tuple[Tree, int]:
    tree = make()
    gc.collect()
    before = _malloced()
    serve(tree, prompts)
    gc.collect()
    return tree, _malloced() - before


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library, 2.33 and later."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def _malloced() -> int:
    """Bytes that malloc has handed out and not got back."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
