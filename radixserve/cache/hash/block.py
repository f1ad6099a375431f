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

    A sequence locks a block together with all its parents. A block with only its first tokens
    filled has key b"" and is not listed; it exists until a fork has copied those tokens.
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
