"""`Block` and `BlockNamespace`: the records of `HashBlockCache`. `BlockPool` alone changes them."""

from __future__ import annotations

from array import array

from radixserve.cache.namespace import Namespace
from radixserve.cache.sequence import NamespaceEntry


class BlockNamespace(NamespaceEntry):
    """One namespace's blocks by key."""

    __slots__ = ("blocks", "num_sequences", "root_key")

    def __init__(self, key: Namespace, root_key: bytes) -> None:
        super().__init__(key)
        self.root_key = root_key  # where its chains of keys begin
        self.num_sequences = 0  # live ones
        self.blocks: dict[bytes, Block] = {}


class BlockRun:
    """Findable blocks that follow each other without a branch, so that one comparison finds many.

    Grows at its end when the block after its last one is published, shrinks there by eviction.
    """

    __slots__ = ("blocks", "keys", "pages", "tokens")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.keys: list[bytes] = []  # theirs
        self.pages = array("i")
        self.tokens = bytearray()  # theirs, int32 bytes end to end

    def extend(self, blocks: list[Block], pages: array[int], tokens: bytes) -> None:
        """`pages` and `tokens` are those of `blocks`."""
        for index, block in enumerate(blocks, len(self.blocks)):
            block.run, block.run_index = self, index
        self.blocks += blocks
        self.keys += [block.key for block in blocks]
        self.pages += pages
        self.tokens += tokens

    def cut(self, count: int, width: int) -> None:
        """Keep the first `count` blocks, of `width` bytes each."""
        del self.blocks[count:], self.keys[count:], self.pages[count:]
        del self.tokens[count * width :]


class Block:
    """A page of the cache: the K/V of `tokens` after the chain of blocks that `parent` ends.

    A sequence locks a block together with all its parents. A block with only its first tokens
    filled has key b"" and is not listed; it exists until a fork has copied those tokens.
    """

    __slots__ = (
        "batch",
        "block_id",
        "is_listed",
        "key",
        "last_use",
        "lock_ref",
        "namespace",
        "page",
        "parent",
        "run",
        "run_index",
        "tokens",
    )

    def __init__(
        self,
        namespace: BlockNamespace,
        page: int,
        block_id: int,
        parent: Block | None = None,
        key: bytes = b"",
        tokens: bytes = b"",
    ) -> None:
        self.namespace = namespace
        self.page = page
        self.block_id = block_id  # pages are used again, ids are not
        self.parent = parent
        self.key = key
        self.tokens = tokens  # int32 bytes of a whole block
        self.is_listed = False  # in its namespace's table: look-ups can find it
        self.run: BlockRun | None = None  # of a listed block
        self.run_index = 0  # its place there
        self.last_use = 0.0  # the pool's `now` when a sequence that ended here was released
        self.batch = 0  # see EvictableBlocks
        self.lock_ref = 1  # sequences that use it or have still to copy from it
