"""`Block` and `BlockNamespace`: the records of `HashBlockCache`. `BlockPool` alone changes them."""

from __future__ import annotations


class BlockWatcher:
    """Somebody whose match ends at a block; compared by identity."""

    __slots__ = ()


class BlockNamespace:
    """One namespace's blocks by key. Dead after a reset: nobody new finds it."""

    __slots__ = ("blocks", "is_dead", "name", "num_sequences", "root_key")

    def __init__(self, name: str, root_key: bytes) -> None:
        self.name = name
        self.root_key = root_key  # where its chains of keys begin
        self.is_dead = False
        self.num_sequences = 0  # live ones
        self.blocks: dict[bytes, Block] = {}


class Block:
    """A page of the cache: the K/V of `tokens` behind the chain of blocks that `parent` ends.

    Who holds a block holds all of its parents. Its head alone may be filled: then its key is b"",
    nobody can find it, and it is there because a fork has still to copy that head.
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
        self.block_id = block_id  # its name: pages are used again
        self.parent: Block | None = None
        self.key = b""
        self.tokens = b""  # int32 bytes of a whole block
        self.is_listed = False  # in its space's table: others can find it
        self.lock_ref = 1  # sequences that use it or have still to copy from it
