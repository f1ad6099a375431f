"""`WeightEpochs`: an extension of the engine that replaces its weights.

- runner: the weights; checks them before it uses any
- tree: K/V by epoch, see `RadixTree.begin_epoch`
- open requests: which weights sampled which tokens, see `OpenRequests`
- here: which weights are which epoch. Weights that come again have their number again. Buckets of
  tensors wait here for the last one
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.epochs.messages import GetWeights, KVAfterUpdate, UpdateWeights, WeightsInfo
from radixserve.epochs.open_requests import OpenRequests

if TYPE_CHECKING:
    from radixserve.engine.engine import Engine

_log = logging.getLogger("radixserve")
MAX_KNOWN = 4096  # weights whose numbers are remembered


class WeightEpochs(EngineExtension):
    """The engine's thread makes all calls."""

    name = "weights"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open_requests = OpenRequests()
        engine.scheduler.plug_in(self._open_requests)
        self._epoch = self._num_updates = 0
        self._version: str | None = None
        self._seconds = 0.0  # in which the engine waited for weights
        self._numbers: dict[str, int] = {}  # of the epochs, by weights, the last used last
        self._last = 0  # the highest number
        self._bucket: dict[str, Any] = {}  # tensors by name that wait for others

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        match message:
            case UpdateWeights(weights, kv, version, is_last):
                given, self._bucket = self._bucket, {}
                if not isinstance(weights, str):
                    weights = {**given, **weights}
                if is_last:
                    return self._update(weights, kv, version)
                assert not isinstance(weights, str), "a folder comes whole"
                self._bucket = weights
                return self._epoch
            case GetWeights():
                return WeightsInfo(self._epoch, self._version, self._engine.is_paused)
        return answer

    def _update(
        self, given: str | Mapping[str, Any], kv: KVAfterUpdate, version: str | None
    ) -> int:
        """Returns the number of the epoch. Whatever the runner raises, its weights are the old
        ones then."""
        engine, began = self._engine, time.perf_counter()
        if not self._numbers:
            self._numbers[engine.runner.weights_id] = 0
        was_paused = engine.is_paused
        engine.pause()
        try:
            weights = engine.runner.update_weights(given)
            self._epoch = self._number_of(weights)
            engine.cache.begin_epoch(self._epoch)
            engine.scheduler.sessions.forget_claims()
            engine.extensions.on_epoch(weights)
            self._open_requests.begin_epoch(self._epoch, keeps_kv=kv == "stale")
        finally:
            if not was_paused:
                engine.resume()
        self._version = version
        self._num_updates += 1
        seconds = time.perf_counter() - began
        self._seconds += seconds
        _log.info("weights of epoch %d after %.3f s", self._epoch, seconds)
        return self._epoch

    def _number_of(self, weights: str) -> int:
        number = self._numbers.pop(weights, None)
        if number is None:
            self._last = number = self._last + 1
        self._numbers[weights] = number
        if len(self._numbers) > MAX_KNOWN:
            del self._numbers[next(iter(self._numbers))]
        return number

    def stats(self) -> dict[str, Any]:
        """epoch: number of the present weights. updates: since the start. update_s: seconds in
        which no step could run for them. waiting_tensors: of buckets before the last one."""
        return {
            "epoch": self._epoch,
            "updates": self._num_updates,
            "update_s": self._seconds,
            "waiting_tensors": len(self._bucket),
            "is_paused": int(self._engine.is_paused),
        }
