"""`Block` and `BlockNamespace`: the records of `HashBlockCache`. `BlockPool` alone changes them."""

from __future__ import annotations

from radixserve.cache.sequence import Namespace


class BlockNamespace(Namespace):
    """One namespace's blocks by key."""

    __slots__ = ("blocks", "num_sequences", "root_key")

    def __init__(self, name: str, root_key: bytes) -> None:
        super().__init__(name)
        self.root_key = root_key  # where its chains of keys begin
        self.num_sequences = 0  # live ones
        self.blocks: dict[bytes, Block] = {}


class Block:
    """A page of the cache: the K/V of `tokens` after the chain of blocks that `parent` ends.

    A sequence that locks a block locks all of its parents. A block whose head alone is filled has
    the key b"" and cannot be found; it exists while a fork still has to copy that head.
    """

    __slots__ = (
        "block_id",
        "is_listed",
        "key",
        "lock_ref",
        "namespace",
        "page",
        "parent",
        "tokens",
    )

    def __init__(self, namespace: BlockNamespace, page: int, block_id: int) -> None:
        self.namespace = namespace
        self.page = page
        self.block_id = block_id  # pages are used again, ids are not
        self.parent: Block | None = None
        self.key = b""
        self.tokens = b""  # int32 bytes of a whole block
        self.is_listed = False  # in its namespace's table: look-ups can find it
        self.lock_ref = 1  # sequences that use it or have still to copy from it
