"""The messages of vLLM's KV event stream, as of vLLM 0.33.

A batch is a msgpack array, its events are maps with their name under "type".
"""

from __future__ import annotations

import msgspec


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A change of the set of whole blocks that are cached."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one prefix. `medium` is "GPU" for the tier that is computed from."""

    block_hashes: list[int]  # 64 bits, each of all tokens up to the block's end
    parent_block_hash: int | None  # of the block before the first
    token_ids: list[int]  # block_size ids per block
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # further inputs of each block's hash
    cache_salt: str | None = None  # as SGLang writes it: the namespace


class BlockRemoved(KVCacheEvent):
    """Blocks that are no longer cached, the deepest first."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """No block is cached."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
