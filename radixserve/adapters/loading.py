"""Reads adapters from their folders, for a runner that computes with them. Loads torch when
called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from radixserve.adapters.table import Adapter, AdapterInfo
from radixserve.checks import shown
from radixserve.errors import InvalidRequest

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner


class LoadedAdapter(NamedTuple):
    """An adapter that was read, and what the runner packed of it."""

    info: AdapterInfo
    weights: Any


def load(name: str, path: str, pack: Callable[[Mapping[str, Any]], Any]) -> LoadedAdapter:
    """Read an adapter's folder. `pack`: the runner's. From any thread. Raises InvalidRequest for a
    folder that is no adapter, ModelNotSupported naming what of it is not computed."""
    from radixserve.adapters.peft_folder import read_peft

    read = read_peft(path)
    weights = pack(read.modules)
    info = AdapterInfo(name, path, read.rank, read.invocation, weights.num_bytes, read.digest)
    return LoadedAdapter(info, weights)


def read_again(runner: ModelRunner, adapter: Adapter) -> Any:
    """What the runner packs of an adapter's folder. Raises InvalidRequest where its files have
    changed since it was loaded."""
    loaded = load(adapter.info.name, adapter.info.path, runner.pack_adapter)
    if loaded.info.digest != adapter.info.digest:
        raise InvalidRequest(
            f"the files in {shown(adapter.info.path)} have changed since it was loaded"
        )
    return loaded.weights
