"""`ModelRunner`: the engine's interface to a runner, on one device or on several.

A runner owns the model, the KV pool and the attention backend. It reads a step's rows during
`launch` only; on a device, a request's `slot` keeps its pages and, with penalties,
its token counts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from radixserve.attention.base import AttentionBackend
from radixserve.attention.choice import BACKENDS
from radixserve.checks import shown
from radixserve.config import EngineConfig, parse_bytes
from radixserve.daemon_call import call_in_thread
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.given_weights import read_given
from radixserve.models.parallel import TPGroup
from radixserve.models.registry import load_model
from radixserve.models.source import ModelSource, find_model
from radixserve.models.vision_tower import VisionTower
from radixserve.runner.device import check_dtype, choose_kv_dtype, describe_device
from radixserve.runner.kv_layout import KVLayout
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.picture_rows import PictureRows
from radixserve.runner.rounding_check import RoundingCheck
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput, WindowLayers
from radixserve_kernels.cpu_library import code_fingerprint
from radixserve_kernels.stored_kv import INT8_FORM, dtype_name

logger = logging.getLogger("radixserve")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes."""

    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    kv_bytes_per_token: int
    kv_dtype: str  # of stored K and V, "int8"
    states_bytes: int = 0  # of recurrent layers
    window_tokens: int = 0  # tokens whose K and V of layers with windows have room; 0: pool_tokens


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The settings with every "auto" resolved."""

    device: str  # "cpu", or "cuda:0 (NVIDIA H200)"
    dtype: str  # "bfloat16"
    attention_backend: str
    graph_sizes: tuple[int, ...]  # rows of the captured decode steps
    overlap: bool  # whether the next step is prepared while one runs
    piecewise_tokens: int = 0  # steps of up to so many tokens are graphs but for their attention
    inexact: str = (
        ""  # why a token's bits may depend on what is cached or runs beside it; "": never
    )

    def __str__(self) -> str:
        parts = [self.device, self.dtype, f"{self.attention_backend} attention"]
        if self.graph_sizes:
            parts.append(f"graphs of decode steps of up to {self.graph_sizes[-1]} rows")
        if self.piecewise_tokens:
            parts.append(f"piecewise graphs of up to {self.piecewise_tokens} tokens")
        if self.overlap:
            parts.append("overlap")
        return ", ".join(parts)


class StorablePool(NamedTuple):
    """A KV pool whose K/V may be kept in a store."""

    pool: KVPool
    layout: KVLayout  # of a token
    settings: dict[str, object]  # JSON values: what decides the bits of K/V beside the weights


class ModelRunner(ABC):
    """A `SchedulerOutput` in, a `ModelRunnerOutput` out. One thread; `close` from any.

    Steps run in the order of their launches, one after the other, each one's page copies first.
    """

    model_path: Path | None  # a folder or a GGUF file; None: random weights
    weights_id: str = ""  # tells its weights from others, see `update_weights`
    weights_are_given: bool = False  # they came as tensors, not from `model_path`
    info: ModelInfo
    num_pages: int
    num_states: int = 0  # recurrent states, of a model with such layers
    windows: WindowLayers | None = None  # layers whose K and V have window pages
    pictures: PictureRows | None = None  # of a model that takes pictures
    no_pictures: str = "several ranks take no pictures"  # why it takes none; "": it does
    overlap_depth: int  # steps that may be in flight when the next one is launched: 0 or 1
    backend_name: str
    resolved_config: ResolvedConfig

    @abstractmethod
    def launch(self, schedule: SchedulerOutput) -> Any:
        """Queue a step, or lay it out; returns what `collect` takes.

        Raises ValueError on a row whose pages do not fit it, EngineDead when no step can be
        computed any more. Nothing of the step was computed then.
        """

    @abstractmethod
    def collect(self, pending: Any) -> ModelRunnerOutput:
        """Wait for a launched step, or compute it, in the order of the launches; each once.

        Raises EngineDead when no step can be computed any more.
        """

    @abstractmethod
    def memory_plan(self) -> MemoryPlan: ...

    def storable_pool(self) -> StorablePool:
        """The pool, for a kv_store. Raises InvalidRequest where its K/V cannot be stored."""
        raise InvalidRequest(
            "kv_store cannot be used with tensor_parallel_size > 1: each rank has some of the heads"
        )

    def pack_adapter(self, modules: Mapping[str, Any]) -> Any:
        """See `LanguageModel.pack_adapter`. From any thread. Raises ModelNotSupported."""
        del modules
        raise ModelNotSupported("adapters over several ranks are not built")

    def put_adapter(self, number: int, weights: Any | None) -> None:
        """From the next step on compute rows of that `AdapterUse.number` with `weights`, what
        `pack_adapter` made. None: there are no such rows any more. Raises ModelNotSupported."""
        del number, weights
        raise ModelNotSupported("adapters over several ranks are not built")

    def update_weights(self, weights: str | Mapping[str, torch.Tensor]) -> str:
        """Compute with other weights of the same model from the next step on: those of a checkpoint
        or GGUF file, or tensors by their names in a checkpoint. No step may be in flight.

        Returns what tells them from others. Raises InvalidRequest or ModelNotSupported, and changes
        nothing, where names, shapes or dtypes are not the model's.
        """
        del weights
        raise InvalidRequest("weights cannot be updated with tensor_parallel_size > 1")

    def warm_up(self) -> bool:
        """Do a few milliseconds of the work that the first steps would do, between two steps.
        Returns False once there is none."""
        return False

    def close(self) -> None:
        """End the processes that the runner started. Can be called again."""
        return


RunnerKind = Callable[[str, EngineConfig, TPGroup | None], ModelRunner]  # of one device; a class


class SingleDeviceRunner(ModelRunner):
    """A `ModelRunner` on one device, with its own model and pool."""

    model: LanguageModel
    pool: KVPool
    backend: AttentionBackend  # of steps that no graph serves
    _rounding_check: RoundingCheck | None = None  # of K and V in 8 bits, until a long prompt came

    def __init__(self, parts: LoadedModel, config: EngineConfig) -> None:
        self.model_path, info = parts.model_path, parts.model.info
        kv_dtype = choose_kv_dtype(
            *(config.kv_dtype, info.dtype, parts.device, parts.backend_name),
            offered=BACKENDS[parts.backend_name].kv_dtypes,
        )
        self.info = info if kv_dtype is None else replace(info, kv_dtype=kv_dtype)
        self.model, self._device, self._config = parts.model, parts.device, config
        self._adapters: dict[int, Any] = {}  # by their numbers
        self._source, self._load_config = parts.source, parts.config
        self.weights_id = parts.source.weights_id()
        self.no_pictures = parts.source.no_pictures or parts.model.no_pictures
        if not self.no_pictures and info.uncut_rows:
            self.no_pictures = _cannot_look_ahead(parts.backend_name)
        if not self.no_pictures and parts.source.path is not None:
            tower = VisionTower(parts.source.path, info.dtype, parts.device)
            most = parse_bytes(config.image_memory, "image_memory")
            self.pictures = PictureRows(
                *(tower, info.hidden_size, most, parts.source.mrope),
                see_each_other=info.uncut_rows > 0,
            )

    def pack_adapter(self, modules: Mapping[str, Any]) -> Any:
        return self.model.pack_adapter(modules)

    def put_adapter(self, number: int, weights: Any | None) -> None:
        if weights is None:
            del self._adapters[number]
        else:
            self._adapters[number] = weights

    def _start_rounding_check(self) -> None:
        """After pool and backend are made."""
        if self.info.stored_kv_dtype.itemsize == 1:
            self._rounding_check = RoundingCheck(
                *(self.pool.layers, self.pool.page_size), scales_last=self.backend.scales_last
            )

    def _check_rounding(self) -> None:
        """Run the check if the step just computed had a long prompt."""
        if self._rounding_check is not None and self._rounding_check.warn():
            self._rounding_check = None

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(
            weight_bytes=self.info.weight_bytes,
            pool_bytes=self.pool.num_bytes,
            pool_tokens=self.num_pages * self.pool.page_size,
            kv_bytes_per_token=self.info.kv_bytes_per_token,
            kv_dtype=dtype_name(self.info.stored_kv_dtype),
            states_bytes=self.num_states * self.info.state_bytes,
            window_tokens=self.pool.num_window_pages * self.pool.page_size,
        )

    def update_weights(self, weights: str | Mapping[str, torch.Tensor]) -> str:
        """See `ModelRunner`. Files, which may turn out to be broken in their middle, are read
        beside the old weights: for a device, whose memory is taken, on the host. Models that do
        not `read_again` are made anew beside the old one."""
        if isinstance(weights, str):
            source = held = find_model(weights, self._config.seed)
            if self._device.type != "cpu" and self.model.is_same_shape(source):
                held = source.in_memory(self.info.dtype)
        else:
            source = held = replace(self._source, given=read_given(weights))
        weights_id = call_in_thread("radixserve-weights", source.weights_id)  # may read all of them
        tower = self._tower_of(source)
        with torch.no_grad():
            is_done = held.given is not None and self.model.read_again(held)
        if not is_done:
            self._replace_weights(source)
        self.weights_id = weights_id.result()
        self.weights_are_given = source.given is not None
        if source.given is None:
            self.model_path = source.path
        if self.pictures is not None and tower is not None:
            self.pictures.set_tower(tower)
        self._source = replace(source, given=None)  # the caller's tensors are not kept
        return self.weights_id

    def _tower_of(self, source: ModelSource) -> VisionTower | None:
        """The tower that encodes pictures with these weights; None: there are no pictures."""
        if self.pictures is None or source.path is None:
            return None
        if source.given is not None:
            return self.pictures.tower.with_weights(source.given)
        return VisionTower(source.path, self.info.dtype, self._device)

    def _replace_weights(self, source: ModelSource) -> None:
        new, backend_name = load_model(source, self._load_config, self._device)
        old = self.model.info
        if type(new) is not type(self.model) or not old.is_like(new.info):
            differing = [
                f"{name} {shown(getattr(new.info, name))}, not {shown(getattr(old, name))}"
                for name in _COMPARED
                if getattr(new.info, name) != getattr(old, name)
            ]
            raise InvalidRequest(
                f"these are weights of another model: {'; '.join(differing) or 'other layers'}"
            )
        assert backend_name == self.backend_name, "it follows from the model"
        with torch.no_grad():
            self.model.take_weights(new)
        self.info = replace(new.info, kv_dtype=self.info.kv_dtype)

    def storable_pool(self) -> StorablePool:
        config, info = self._config, self.info
        reason = ""
        if self.num_states:
            reason = f"{info.architecture}: its recurrent states are not stored"
        elif self.windows is not None:
            reason = "window pages: set swa_full_tokens_ratio to 1"
        if reason:
            raise InvalidRequest(f"kv_store cannot be used with {reason}")
        settings = {
            "architecture": info.architecture,
            "num_parameters": info.num_parameters,
            "weight_forms": [list(form) for form in info.weight_forms],
            "model_impl": "native" if info.is_native else "transformers",
            "weight_dtype": config.weight_dtype,
            "activation_bits": config.activation_bits,
            "attention_backend": self.backend_name,
            "device": self._device.type,
            "exact": not self.resolved_config.inexact,
            "kernels": code_fingerprint() if self.backend_name == "cpu" else "",
            "torch": torch.__version__,
        }
        if info.stored_kv_dtype == torch.int8:
            settings["kv_form"] = INT8_FORM
        return StorablePool(self.pool, self.pool.layout, settings)

    def _describe(self, graph_sizes: tuple[int, ...] = (), piecewise_tokens: int = 0) -> None:
        """Set the descriptive attributes after pool and backend are made, and log them."""
        self.num_pages, self.backend_name = self.pool.num_pages, self.backend.name
        self.resolved_config = ResolvedConfig(
            device=describe_device(self._device),
            dtype=str(self.info.dtype).removeprefix("torch."),
            attention_backend=self.backend_name,
            graph_sizes=graph_sizes,
            overlap=self._config.overlap and self.overlap_depth > 0,
            piecewise_tokens=piecewise_tokens,
            inexact=self._inexact_reason(),
        )
        logger.info(
            "%s, %d parameters, on %s; %d pages of %d tokens in %s (%d MiB)",
            self.info.architecture,
            self.info.num_parameters,
            self.resolved_config,
            self.num_pages,
            self.pool.page_size,
            dtype_name(self.info.stored_kv_dtype),
            self.pool.num_bytes >> 20,
        )
        if self.num_states:
            states_bytes = self.num_states * self.info.state_bytes
            logger.info("%d recurrent states (%d MiB)", self.num_states, states_bytes >> 20)

    def _inexact_reason(self) -> str:
        """See `ResolvedConfig.inexact`. On the CPU; CudaModelRunner has its own."""
        if self.backend_name != "cpu":
            return "PyTorch's products sum in another order for another number of rows"
        if self.info.inexact:
            return self.info.inexact
        is_exact = self._config.is_exact_on("cpu") or self.info.is_quantized
        return "" if is_exact else "exact=False was given"


def _cannot_look_ahead(backend_name: str) -> str:
    """Why a backend cannot compute rows of a picture that see each other; "" if it can."""
    if "bidirectional" in BACKENDS[backend_name].features:
        return ""
    others = [name for name, one in BACKENDS.items() if "bidirectional" in one.features]
    return (
        "the rows of a picture see each other in this model, which the attention backend "
        f"{backend_name} does not compute; {' and '.join(others)} do"
    )


_COMPARED = ("architecture", "num_layers", "hidden_size", "vocab_size", "max_positions", "dtype")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device."""

    model: LanguageModel
    backend_name: str  # of the attention backend to run it with
    device: torch.device
    source: ModelSource
    config: EngineConfig  # that it was loaded with

    @property
    def model_path(self) -> Path | None:
        return self.source.path


def load_on_device(
    model_path: str, config: EngineConfig, device: torch.device, tp_group: TPGroup | None
) -> LoadedModel:
    """model_path: a checkpoint folder, a hub id or "random:" and a known size.

    Raises InvalidRequest (no such model, a setting that does not fit it) or ModelNotSupported
    (naming the reason).
    """
    check_dtype(config.dtype, device)
    source = find_model(model_path, config.seed)
    model, backend_name = load_model(source, config, device, tp_group)
    longest = model.info.max_positions
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise InvalidRequest(f"max_seq_len must be at most the model's {longest} positions")
    return LoadedModel(model, backend_name, device, source, config)
