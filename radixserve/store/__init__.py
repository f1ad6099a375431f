"""K/V of cached prefixes in files, so that it outlives the process and the pool.

The radix tree alone decides what is a prefix. A store knows runs: consecutive tokens with their
K/V, named by everything before them.
"""

from radixserve.store.folder_store import FolderStore
from radixserve.store.host_store import HostStore, TieredStore
from radixserve.store.run_file import BadRun, KVRun, OtherRun, decode_run, encode_run
from radixserve.store.run_store import NotAFile, RunStore, StoredFile
from radixserve.store.stored_prefixes import MAX_RUN_TOKENS, StoredPrefix, StoredPrefixes, StoredRun
from radixserve.store.use_counts import ReturnRate, UseCounts

__all__ = [
    "MAX_RUN_TOKENS",
    "BadRun",
    "FolderStore",
    "HostStore",
    "KVRun",
    "NotAFile",
    "OtherRun",
    "ReturnRate",
    "RunStore",
    "StoredFile",
    "StoredPrefix",
    "StoredPrefixes",
    "StoredRun",
    "TieredStore",
    "UseCounts",
    "decode_run",
    "encode_run",
]
