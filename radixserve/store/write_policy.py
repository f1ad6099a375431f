"""`WritePolicy`: how much of an ended request is written to the store while others run."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.config import KVStoreWrite
from radixserve.store.counts import StoreCounts
from radixserve.store.load_cost import LoadCostModel
from radixserve.store.use_counts import ReturnRate, UseCounts

_FIRST_WRITE_S = 1.2e-9  # for each byte, until writes were timed
_RETURNS_WINDOW = 4  # pools of evicted tokens, after which half of them are forgotten
_WEIGHT = 0.1  # of a new measurement


class WritePolicy:
    """Decides by `kv_store_write`; with "auto" by what writes cost and later loads save. The
    engine's thread makes all calls but `note_write`."""

    def __init__(
        self,
        name: KVStoreWrite,
        cache: RadixCache,
        cost: LoadCostModel,
        counts: StoreCounts,
        *,
        min_uses: int = 2,
        min_tokens: int = 16,
        is_on_device: bool = False,
        step_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        name          what is written when, see `EngineConfig.kv_store_write`
        min_uses      of a prefix, before the policy "reuse" writes it
        min_tokens    fewer are not written
        is_on_device  the pool is not in host memory: steps take no CPU time
        step_seconds  seconds in which steps were under way so far
        """
        self.name = name
        self.write_s = _FIRST_WRITE_S  # CPU seconds for each byte, in the writer's thread
        self.copy_s = 0.0  # for each byte, in the engine's thread
        self._cache, self._cost, self._counts = cache, cost, counts
        self._min_tokens, self._is_on_device = min_tokens, is_on_device
        self._step_seconds = step_seconds
        self._uses = UseCounts(min_uses)
        self._returns = ReturnRate(_RETURNS_WINDOW * cache.num_pages * cache.page_size)
        self._missed_s = 0.0  # that loads would have saved, of what was not worth writing
        self._cpu_before_s: float | None = None  # of the engine's thread at the first request

    def note_request(self) -> None:
        """A request arrives: the CPU time of the engine's thread counts from the first one on."""
        if self._cpu_before_s is None:
            self._cpu_before_s = time.thread_time()

    def note_copy(self, num_bytes: int, cpu_s: float) -> None:
        """A copy out of the pool took so long."""
        self.copy_s += _WEIGHT * (cpu_s / num_bytes - self.copy_s)

    def note_write(self, num_bytes: int, cpu_s: float) -> None:
        """A write took so long."""
        self.write_s += _WEIGHT * (cpu_s / num_bytes - self.write_s)

    def clear(self) -> None:
        """Forget which prefixes were used."""
        self._uses.clear()

    def num_wanted(
        self,
        tokens: IntArray,
        namespace: str,
        num_prompt: int,
        num_reused: int,
        num_stored: Callable[[IntArray], int],
    ) -> int:
        """Leading tokens of an ended request that are to be written even while others run.

        num_prompt  tokens of its prompt
        num_reused  leading tokens that it did not compute
        num_stored  how many leading tokens of a sequence are known to be stored
        """
        if self.name in ("finish", "evict"):
            return len(tokens)
        if self.name == "reuse":
            num_again = self._uses.note(tokens, namespace)
            return max(num_again, num_reused) if self._uses.min_uses == 2 else num_again
        num_again = self._uses.note(tokens, namespace, num_reused)
        num_returned = max(0, min(num_again, num_prompt) - num_reused)
        self._counts.returned_tokens += num_returned
        compute_s = self._cost.seconds_per_token
        if compute_s is None:
            return 0
        write_s = self._cost.token_bytes * (self.write_s + self.copy_s)
        rate = self._return_rate
        if not num_returned and write_s >= rate * compute_s:
            return 0  # not even if loads were free
        saved_s = self._cpu_share * compute_s - self._cost.token_bytes / self._cost.bandwidth
        if saved_s <= 0.0:
            return 0
        end = len(tokens) if write_s < rate * saved_s else num_again
        if end - num_reused < self._min_tokens:  # what was in memory is not about to be evicted
            return 0
        gain_s = saved_s * (num_returned + rate * (end - num_reused - num_returned))
        if (end - num_stored(tokens[:end])) * write_s < gain_s + self._missed_s:
            self._missed_s = 0.0
            return end
        self._missed_s += gain_s  # of requests that share a long prefix each gains little
        return 0

    @property
    def _cpu_share(self) -> float:
        """Of the time in which steps were computed, that the engine's thread had a core: the cost
        of writes is CPU time. 1 on a device."""
        steps_s = self._step_seconds()
        if self._is_on_device or not steps_s:
            return 1.0
        return min(1.0, (time.thread_time() - (self._cpu_before_s or 0.0)) / steps_s)

    @property
    def _return_rate(self) -> float:
        """The share of evicted tokens that are asked for again, by what was seen lately."""
        num_returned = self._counts.returned_tokens + self._counts.loaded_tokens
        return self._returns.share(self._cache.num_evicted_tokens, num_returned)
