"""`RuntimeWeights`: the methods of `Runtime` that pause it and replace its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from radixserve.api.client import RuntimeMethods
from radixserve.checks import check_choice, check_text
from radixserve.engine.messages import PauseEngine, ResumeEngine
from radixserve.epochs.messages import GetWeights, KVAfterUpdate, UpdateWeights, WeightsInfo
from radixserve.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

PauseMode = Literal["keep", "abort"]


class RuntimeWeights(RuntimeMethods):
    """Pauses, and weights that change while it runs."""

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing after the steps in flight, until `resume`.

        mode  "keep": open requests wait with what they have computed; "abort": they end, with
              finish_reason "abort" and their tokens so far

        Requests that are submitted meanwhile wait, too. May be called again.
        """
        check_choice("mode", mode, get_args(PauseMode))
        self._client.core.call(PauseEngine())
        if mode == "abort":
            self._client.core.abort(None)

    def resume(self) -> None:
        """Continue after `pause`. Without one it does nothing."""
        self._client.core.call(ResumeEngine())

    def update_weights(
        self,
        weights: str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        kv: KVAfterUpdate = "recompute",
        version: str | None = None,
        is_last: bool = True,
    ) -> int:
        """Compute with other weights of the same model from now on.

        weights  a checkpoint folder or GGUF file, or all tensors by their names in a checkpoint;
                 they are read before this returns, and not kept
        kv       what becomes of the K/V of open requests. "recompute": it is computed again from
                 their tokens, so that they continue as if they had begun with the new weights;
                 "stale": it stays as it is, and new tokens follow it. Beam searches, cache="hash",
                 and models with recurrent or windowed layers, always compute it again
        version  a name of the weights for `weights_info`
        is_last  False: tensors are a bucket, of which a copy waits for those of further calls; the
                 last call updates with all of them. A call that fails drops them

        Returns the number of the weights' epoch: a new one, or its number of before where these
        weights were used already. New requests find K/V of this epoch only. K/V of others leaves
        when pages are needed, and is found again if its weights come back before. The engine waits
        meanwhile, and is paused afterwards only if it was before. Names, shapes and dtypes are
        checked first: InvalidRequest or ModelNotSupported for weights that do not fit, and nothing
        has changed then.
        """
        check_choice("kv", kv, get_args(KVAfterUpdate))
        if version is not None:
            check_text("version", version)
        given = _read_weights(weights)
        if not is_last:
            if isinstance(given, str):
                raise InvalidRequest("is_last=False is for tensors: a path names all weights")
            given = {name: tensor.detach().clone() for name, tensor in given.items()}
        return self._client.core.call(UpdateWeights(given, kv, version, is_last))

    @property
    def weights_info(self) -> WeightsInfo:
        """The number of the weights' epoch, their `version`, and whether the engine is paused."""
        return self._client.core.call(GetWeights())


def _read_weights(weights: object) -> str | Mapping[str, Tensor]:
    """Returns a path as text, or checked tensors. Raises InvalidRequest."""
    if isinstance(weights, str | os.PathLike):
        return str(os.fspath(weights))
    from radixserve.models.given_weights import read_given  # loads torch, as a runner did before

    return read_given(weights)
