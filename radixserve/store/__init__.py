"""K/V of cached prefixes in files, so that it outlives the process and the pool.

The radix tree alone decides what is a prefix. A store knows runs: consecutive tokens with their
K/V, named by everything before them.
"""

from radixserve.store.folder_store import FolderStore
from radixserve.store.run_file import BadRun, KVLayout, KVRun, decode_run, encode_run
from radixserve.store.stored_prefixes import MAX_RUN_TOKENS, StoredPrefix, StoredPrefixes, StoredRun

__all__ = [
    "MAX_RUN_TOKENS",
    "BadRun",
    "FolderStore",
    "KVLayout",
    "KVRun",
    "StoredPrefix",
    "StoredPrefixes",
    "StoredRun",
    "decode_run",
    "encode_run",
]
