"""SGLang's radix tree, its Rust and its Python core, running its own unmodified code.

    pip install --no-deps --target DIR sglang==0.5.23 msgspec dill triton
    PYTHONPATH=DIR:.:kernels python benchmarks/bench_cache.py

is enough beside torch and numpy: packages that its import wants and that the tree never calls are
empty stubs. The objects are those of its server, at page size 1 on the CPU. A prompt is array("q"),
made outside of the timed region, wrapped into a `RadixKey` for each match as its engine does. The
calls are those that its scheduler makes for a request that is prefilled in one chunk and ends, with
one publication where its scheduler makes two, and none of the batch's tensors.

`SGLangCore` is the same Rust tree and allocator without that scheduler path: only what a tree must
do for a request, so that nothing of the comparison is the price of the Python around it.
"""

from __future__ import annotations

import warnings
from array import array
from typing import Any

from cache.stub_packages import stub_packages

from radixserve.arrays import IntArray

_UNUSED = (  # asked for by its import, never called by its tree
    *("aiohttp", "compressed_tensors", "gguf", "IPython", "openai", "orjson", "PIL"),
    *("partial_json_parser", "psutil", "pybase64", "requests", "sentencepiece", "sniffio"),
    *("starlette", "torchvision", "tvm_ffi", "zmq"),
)
_LONGEST = 160_000  # tokens of a request
_NONE = "extra_key cache_salt session_id mamba_value swa_branching_seqlen rotation_base".split()
_ZERO = "swa_evicted_seqlen inserted_len priority".split()
_PLAIN_INSERT = {**dict.fromkeys(_NONE), **dict.fromkeys(_ZERO, 0), "track_adopted_ranges": False}
_PLAIN_UNLOCK: dict[str, Any] = {
    "skipped_lock_components": [],
    "component_lock_uuids": {},
    "component_host_lock_uuids": {},
}


class SGLang:
    """The names of SGLang that the trees need. Raises what its import raises."""

    def __init__(self) -> None:
        with stub_packages(*_UNUSED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from sglang.srt.managers.schedule_batch import ReqKvInfo
            from sglang.srt.mem_cache.allocation import alloc_token_slots
            from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
            from sglang.srt.mem_cache.cache_init_params import CacheInitParams
            from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
            from sglang.srt.mem_cache.radix_cache import RadixKey
            from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
            from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        torch.set_num_threads(1)
        self.torch, self.record, self.key = torch, ReqKvInfo, RadixKey
        self.match_params, self.evict_params = MatchPrefixParams, EvictParams
        self.alloc, self.rust_core = alloc_token_slots, RustUnifiedTreeCore

        self._pool, self._rows, self._params = (
            TokenToKVPoolAllocator,
            ReqToTokenPool,
            CacheInitParams,
        )
        self._components, self._cache = (ComponentType.FULL,), UnifiedRadixCache

    def _build(self, core: str, num_pages: int) -> Any:
        slots = self._pool(num_pages, self.torch.float16, "cpu", None, need_sort=False)
        params = self._params(
            disable=False,
            req_to_token_pool=self._rows(2, _LONGEST, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=slots,
            page_size=1,
            tree_components=self._components,
            tree_core_backend=core,
        )
        return self._cache(params)

    def rust_tree(self, num_pages: int) -> SGLangTree:
        tree = SGLangTree(self, self._build("rust", num_pages))
        assert isinstance(tree.cache.tree_core, self.rust_core), "SGLang fell back to Python"
        return tree

    def core_tree(self, num_pages: int) -> SGLangCore:
        return SGLangCore(self, self._build("rust", num_pages))

    def python_tree(self, num_pages: int) -> SGLangTree:
        return SGLangTree(self, self._build("python", num_pages))


class _Request:
    """What the tree reads of a request."""

    extra_key = cache_salt = priority = session = session_id = kv_rotation_base = None

    def __init__(self, token_ids: array[int], record: Any) -> None:
        self.origin_input_ids = self.full_untruncated_fill_ids = token_ids
        self.kv = record
        self.rid = "request"
        self.prefix_len = 0
        self.last_node: Any = None
        self.lock: Any = None

    def finished(self) -> bool:
        return True


class SGLangTree:
    """A `Tree`, see contenders.py."""

    def __init__(self, engine: SGLang, cache: Any) -> None:
        self.cache = cache
        self._engine = engine

    def prompt(self, tokens: IntArray) -> array[int]:
        return array("q", tokens.tolist())

    def lookup(self, prompt: array[int]) -> int:
        key = self._engine.key(prompt, limit=len(prompt) - 1)
        return int(self.cache.match_prefix(self._engine.match_params(key=key)).device_prefix_len)

    def lock(self, prompt: array[int]) -> None:
        self.cache.unlock(self._matched(prompt).lock)

    def take(self, prompt: array[int]) -> None:
        request = self._matched(prompt)
        self.cache.prefix_device_indices(request)
        self.cache.unlock(request.lock)

    def request(self, prompt: array[int]) -> None:
        cache, rows, length = self.cache, self.cache.req_to_token_pool, len(prompt)
        request = self._matched(prompt)
        prefix = cache.prefix_device_indices(request)
        record, start = request.kv, request.prefix_len
        row = record.req_pool_idx = rows.alloc_rows(1)[0]
        slots = self._engine.alloc(cache, length - start)
        rows.write((row, slice(0, start)), prefix)
        rows.write((row, slice(start, length)), slots)
        record.kv_allocated_len = record.kv_committed_len = length
        cache.checkpoint(request, up_to=length)
        cache.free_kv_row(record, [(record.cache_protected_len, length)])
        cache.unlock(request.lock)
        rows.free_rows([row])

    def evict(self, num_tokens: int) -> int:
        params = self._engine.evict_params(num_tokens=num_tokens)
        return int(self.cache.evict(params).num_tokens_evicted)

    def num_nodes(self) -> int:
        is_rust = isinstance(self.cache.tree_core, self._engine.rust_core)
        return 0 if is_rust else len(self._nodes())  # the Rust core does not tell

    def hidden_bytes(self) -> int:
        """The storages of the page ids of each node: torch allocates past tracemalloc."""
        tensors = [data.value for node in self._nodes() for data in node.component_data]
        stores = [t.untyped_storage() for t in tensors if isinstance(t, self._engine.torch.Tensor)]
        return sum({store.data_ptr(): store.nbytes() for store in stores}.values())

    def _matched(self, prompt: array[int]) -> _Request:
        """A request whose cached prefix is locked."""
        engine, cache = self._engine, self.cache
        request = _Request(prompt, engine.record())
        key = engine.key(prompt, limit=len(prompt) - 1)
        match = cache.match_prefix(engine.match_params(key=key, req=request))
        request.prefix_len = request.kv.cache_protected_len = match.device_prefix_len
        request.last_node = match.last_device_node
        request.lock = cache.lock(match.last_device_node)
        return request

    def _nodes(self) -> list[Any]:
        """All nodes of the Python core but the root."""
        stack, nodes = [self.cache.tree_core.root_node], []
        while stack:
            children = list(stack.pop().children.values())
            nodes += children
            stack += children
        return nodes


class SGLangCore(SGLangTree):
    """The Rust tree by its binding: match, lock, room, insert, unlock."""

    def __init__(self, engine: SGLang, cache: Any) -> None:
        super().__init__(engine, cache)
        self._core = cache.tree_core
        self._tree = self._core._binding
        self._make = self._core._bindings
        self._slots = cache.token_to_kv_pool_allocator
        self._root = self._core.root_node_handle()

    def lookup(self, prompt: array[int]) -> int:
        return int(self._match(prompt).device_prefix_len)

    def lock(self, prompt: array[int]) -> None:
        node = self._match(prompt).last_device_node_id
        self._tree.inc_lock_ref(node, [])
        self._unlock(node)

    def take(self, prompt: array[int]) -> None:
        node = self._match(prompt).last_device_node_id
        self._tree.inc_lock_ref(node, [])
        self._tree.collect_full_device_indices(node, self._root)
        self._unlock(node)

    def request(self, prompt: array[int]) -> None:
        tree, match = self._tree, self._match(prompt)
        node, num_cached = match.last_device_node_id, match.device_prefix_len
        tree.inc_lock_ref(node, [])
        prefix = tree.collect_full_device_indices(node, self._root)
        wanted = len(prompt) - num_cached
        slots = self._slots.alloc(wanted)
        if slots is None:
            self.evict(wanted - self._slots.available_size())
            slots = self._slots.alloc(wanted)
        pages = self._engine.torch.cat((prefix, slots))
        new = {"key": prompt, "value": pages, "prev_prefix_len": num_cached}
        step = tree.begin_insert(self._make.InsertParamsBinding(**_PLAIN_INSERT, **new))
        while step.result is None:
            self._apply(step.actions)
            step = tree.resume_insert()
        self._apply(step.actions)
        self._apply(tree.end_insert())
        self._unlock(node)

    def _match(self, prompt: array[int]) -> Any:
        key = self._make.MatchParamsBinding(key=prompt[:-1], extra_key=None, cache_salt=None)
        return self._tree.match_prefix(key)

    def _apply(self, actions: Any) -> None:
        if actions:
            self.cache._apply_cache_actions(self._core._cache_actions_from_tagged(actions))

    def _unlock(self, node: Any) -> None:
        params = self._make.DecLockRefParamsBinding(node_id=node, **_PLAIN_UNLOCK)
        self._tree.dec_lock_ref(node, params, False)
