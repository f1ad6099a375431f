"""Every other decoder: transformers' own modelling code with its attention function replaced.

The rows of a step are one sequence [1, T] with their own positions and without a mask; each
attention layer calls `attention_forward`, which passes q, k, v to the call's backend with what
attention_probe.py found of the layer: its window, soft cap and sinks. Not every architecture passes
keyword arguments to its attention, so the model's modules carry the backend in a `_Slot`. A model
that cannot run this way is refused at load: by rules on its config, by the probe, and by comparing
a few tokens with the model's eager attention. recurrent.py runs the layers that keep a state
instead of keys and values. On the CPU row_products.py computes the linear layers of models without
such layers, so that a token's bits do not depend on the step that computes it.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    ForwardBatch,
    RecurrentPiece,
    RecurrentRow,
    RecurrentRows,
    RecurrentTokens,
)
from radixserve.attention.cpu import CpuBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.errors import ModelNotSupported, RadixServeError
from radixserve.models.attention_probe import ProbedLayers, can_choose_logits, probe, register
from radixserve.models.base import LanguageModel, ModelInfo, distinct_variants, layer_windows
from radixserve.models.multimodal import WRAPPERS, text_key_mapping, text_name
from radixserve.models.recurrent import Mixers
from radixserve.models.row_products import can_pack, inexact_reason, pack_products
from radixserve.models.source import ModelSource
from radixserve.models.stated_sizes import check_parameters
from radixserve.models.weights import (
    architecture_of,
    is_finite,
    log_other_parts,
    one_line,
    tensor_files,
    tensor_shapes,
    warn_of_broken_weights,
    without_load_report,
)

logger = logging.getLogger("radixserve")
ATTENTION_NAME = "radixserve"  # in transformers' registry of attention functions
NUM_CHECKED = 13  # tokens of the comparison with eager attention
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}  # of the logits' norm
UNPLACED_ROPE = ("dynamic", "longrope")  # depend on the longest sequence in the batch


class _Slot:
    """Holds the backend of the call in progress; one for each loaded model, on its modules."""

    def __init__(self, model: Any) -> None:
        self.backend: AttentionBackend | None = None
        self.probed: ProbedLayers
        self.kv_index: dict[int, int] = {}  # layer -> its place in the pool
        self.kv_shape = 0, 0  # Hkv, D of the pool, the largest of any layer
        self.mixers = Mixers(model)
        for module in model.modules():
            module.radixserve_slot = self

    @contextmanager
    def holding(self, backend: AttentionBackend, recurrent: RecurrentRows | None) -> Iterator[None]:
        self.backend, self.mixers.rows = backend, recurrent
        try:
            yield
        finally:
            self.backend = self.mixers.rows = None


class TransformersModel(LanguageModel):
    """See `LanguageModel`. Made by `load_transformers`."""

    def __init__(self, model: Any, slot: _Slot, info: ModelInfo) -> None:
        self.info = info
        self._model, self._slot = model, slot
        self._can_choose_logits = can_choose_logits(model)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        wanted = {"logits_to_keep": batch.logits_indices} if self._can_choose_logits else {}
        with self._slot.holding(backend, batch.recurrent):
            logits: Tensor = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **wanted,
            ).logits[0]
        if not self._can_choose_logits:
            logits = logits.index_select(0, batch.logits_indices)
        return logits.float()


def attention_forward(
    module: Any,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns [1, T, Hq, Dv] and no weights.

    Heads narrower than the pool's get zeros, which change neither scores nor results; a layer with
    fewer key heads than the pool stores each several times. What a layer takes from an earlier one
    is stored already.
    """
    del attention_mask, kwargs
    slot: _Slot = module.radixserve_slot
    layer: int = module.layer_idx
    value_dim = value.shape[-1]
    num_kv_heads, dim = slot.kv_shape
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = _by_token(query, dim)
    backend, kv_index, features = slot.backend, slot.kv_index[layer], slot.probed.features[layer]
    assert backend is not None, "the model is called outside of `forward`"
    if slot.probed.key_sources[layer] == layer:
        if (copies := num_kv_heads // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        backend.store(_by_token(key, dim), _by_token(value, dim), kv_index)
    out = backend.attend(q, kv_index, scaling, features)
    return out[..., :value_dim].contiguous()[None], None


def _by_token(x: Tensor, dim: int) -> Tensor:
    """x [1, H, T, D] as [T, H, dim], with zeros after each head's values."""
    x = x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))
    return x[0].transpose(0, 1)


def load_transformers(
    source: ModelSource, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Load any decoder-only checkpoint through transformers; quantised ones are widened.

    Raises ModelNotSupported naming the reason if the model needs more than causal attention over
    all earlier positions, or if its results would differ from transformers' own.
    """
    config = source.transformers_config()
    check_architecture(config)
    architecture = architecture_of(config)
    try:
        model = _read_model(source, config, dtype)
        return _checked(model, source, config, dtype, device)
    except (RadixServeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # in the model's own code
        raise ModelNotSupported(
            f"{architecture} failed in the check of its first steps: {error!r}"
        ) from error


def _checked(
    model: Any, source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    model = model.to(device).eval().requires_grad_(False)
    broken = [name for name, tensor in model.named_parameters() if not is_finite(tensor)]
    assert source.path is not None
    warn_of_broken_weights(source.path, broken)
    architecture = architecture_of(config)
    text = config.get_text_config()
    max_positions: int = text.max_position_embeddings
    slot = _Slot(model)
    slot.probed = ProbedLayers(architecture, max_positions)
    with torch.inference_mode():
        slot.mixers.probed_states = {}
        try:
            probe(model, slot.probed, text.num_hidden_layers, slot.mixers.layers, device)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)
        states = slot.mixers.set_shapes()
    own = slot.probed.own_layers()
    slot.kv_index = {
        layer_number: own.index(source) for layer_number, source in slot.probed.key_sources.items()
    }
    num_heads, num_kv_heads, head_dim = slot.probed.largest_shape()
    slot.kv_shape = num_kv_heads, head_dim
    features = slot.probed.features
    info = ModelInfo(
        architecture=architecture,
        is_native=False,
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=text.hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_positions=max_positions,
        eos_ids=source.eos_ids(),
        sampling=source.sampling(),
        dtype=dtype,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_kv_layers=len(own),
        states=states,
        attention_features=tuple(
            sorted(set().union(*(layer_features.names for layer_features in features.values())))
        ),
        attention_variants=distinct_variants(features.values()),
        inexact=_inexact_reason(model, slot.mixers, dtype, device),
        **layer_windows(features[layer] for layer in own),
    )
    if not info.inexact:
        pack_products(model)
    wrapped = TransformersModel(model, slot, info)
    is_current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), is_current:
        _compare_with_eager(wrapped, model, device)
        if not info.inexact and not _has_same_bits_in_chunks(wrapped):
            reason = "its layers round in another way for another number of rows"
            wrapped.info = replace(info, inexact=reason)
    if slot.mixers.is_stepwise:
        logger.warning("%s: tokens after the first chunk run one by one", architecture)
    return wrapped


def _inexact_reason(model: Any, mixers: Mixers, dtype: torch.dtype, device: torch.device) -> str:
    """See `ModelInfo.inexact`; before the linear layers are packed."""
    if not can_pack(dtype, device):
        return "PyTorch's products sum in another order for another number of rows"
    if mixers.layers:
        return "recurrent layers sum in another order for another number of tokens at a time"
    return inexact_reason(model)


def check_architecture(config: Any) -> None:
    """Raise ModelNotSupported for what the config alone shows to be impossible."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = architecture_of(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name} is an encoder-decoder; only decoders can be run")
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = known.get(type(config), None)
    if model_class is None or model_class.__name__ != name:
        if config.get_text_config() is not config:
            raise ModelNotSupported(
                f"{name} takes more than text, and its text model alone cannot be run; possible "
                f"are {', '.join(WRAPPERS)}, each with ForConditionalGeneration after it"
            )
        raise ModelNotSupported(f"{name} is not a causal language model that transformers knows")
    _check_fields(name, config)


def _check_fields(name: str, config: Any) -> None:
    reasons = {
        "attn_temperature_tuning": "queries scaled by their place in the batch, as its "
        "attn_temperature_tuning asks",
    }
    config = config.get_text_config()
    for field, reason in reasons.items():
        if getattr(config, field, None):
            raise ModelNotSupported(f"{name} needs {reason}")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in UNPLACED_ROPE:
            raise ModelNotSupported(
                f"{name} with rope scaling {parameters['rope_type']!r}: a token's keys would "
                "depend on how long its sequence becomes"
            )
    if not getattr(config, "max_position_embeddings", None):
        raise ModelNotSupported(f"{name}'s config does not tell how many positions it has")


def _read_model(source: ModelSource, config: Any, dtype: torch.dtype) -> Any:
    """The model with its weights, ready to call `attention_forward`; every tensor accounted for."""
    from transformers import AttentionInterface
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    AttentionInterface.register(ATTENTION_NAME, attention_forward)  # the same function each time
    register()
    folder = source.path
    assert folder is not None
    widened = source.widened(dtype)
    if widened is None:
        tensor_files(folder)
        if source.is_text_part:
            log_other_parts(folder, sum(text_name(name) is None for name in tensor_shapes(folder)))
        renames = text_key_mapping() if source.is_text_part else None
        path: str | None = str(folder)
        weights: dict[str, Any] = {"key_mapping": renames, "use_safetensors": True}
        optional = frozenset[str]()
    else:
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        path, weights, optional = None, {"state_dict": widened.tensors}, widened.optional
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    _check_size(folder, classes[type(config)], config, source)
    is_partial = source.is_text_part or widened is not None
    try:
        with without_load_report() if is_partial else nullcontext():
            model, loading = classes[type(config)].from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                **weights,
            )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise ModelNotSupported(f"transformers cannot load {folder}: {error!r}") from error
        raise ModelNotSupported(
            f"{architecture_of(config)} does not use transformers' attention interface"
        ) from error
    except Exception as error:
        raise ModelNotSupported(f"transformers cannot load {folder}: {one_line(error)}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted({str(name) for name in loading.get(what) or ()} - optional)
        if source.is_text_part and what == "unexpected_keys":
            names = [name for name in names if text_name(name) is not None]
        if names:
            raise ModelNotSupported(
                f"checkpoint {folder}: {what.replace('_keys', ' tensors')}: {', '.join(names[:6])}"
            )
    return model


def _check_size(folder: Path, model_class: Any, config: Any, source: ModelSource) -> None:
    """Raise ModelNotSupported if the model is far larger than what the checkpoint holds."""
    with torch.device("meta"):
        wanted = sum(
            p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters()
        )
    if source.gguf is None:
        shapes = tensor_shapes(folder)
    else:
        shapes = {name: tensor.shape for name, tensor in source.gguf.tensors.items()}
    check_parameters(folder, wanted, shapes)


def _compare_with_eager(wrapped: TransformersModel, model: Any, device: torch.device) -> None:
    """Raise ModelNotSupported if chunks through the cache differ from eager attention."""
    info = wrapped.info
    tokens = _checked_tokens(info)
    make = TritonBackend if info.dtype == torch.float16 else ReferenceBackend
    paged = _run_in_chunks(wrapped, tokens, (6, NUM_CHECKED - 1), device, make)
    model.set_attn_implementation("eager")
    try:
        expected = model(input_ids=tokens[None].to(device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    error = float((paged - expected).norm() / expected.norm())
    if not error <= TOLERANCE[info.dtype]:
        raise ModelNotSupported(
            f"{info.architecture} computes something else with the cache than without: logits of "
            f"{NUM_CHECKED} tokens differ by {error:.2g} of their norm "
            f"(allowed: {TOLERANCE[info.dtype]:g})"
        )


def _has_same_bits_in_chunks(wrapped: TransformersModel) -> bool:
    """Whether a few tokens have the same logits to the bit, computed at once and in parts."""
    tokens, device = _checked_tokens(wrapped.info), torch.device("cpu")
    at_once, *others = (
        _run_in_chunks(wrapped, tokens, ends, device, CpuBackend) for ends in ((), (1, 3), (7, 8))
    )
    return all(torch.equal(logits, at_once) for logits in others)


def _checked_tokens(info: ModelInfo) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(info.vocab_size, (NUM_CHECKED,), generator=generator)


def _run_in_chunks(
    wrapped: TransformersModel,
    tokens: Tensor,
    ends: Sequence[int],
    device: torch.device,
    make: type[TritonBackend | ReferenceBackend | CpuBackend],
) -> Tensor:
    """Logits [n, V] of all tokens, computed in chunks that end there, over scattered pages of one
    token."""
    info = wrapped.info
    size = len(tokens)
    shape = (info.kv_layers, 2, size, 1, info.num_kv_heads, info.head_dim)
    backend = make(torch.zeros(shape, dtype=info.dtype, device=device), info.num_heads)
    pages = np.arange(size)[::-1].astype(np.int32)
    states = [
        torch.zeros((1, *state.shape), dtype=state.dtype, device=device) for state in info.states
    ]
    parts = []
    for start, end in itertools.pairwise((0, *ends, size)):
        batch = _one_row(tokens[start:end], start, pages[:end], device, states)
        backend.plan(batch)
        parts.append(wrapped.forward(batch, backend))
    return torch.cat(parts)


def _one_row(
    tokens: Tensor, start: int, pages: np.ndarray, device: torch.device, states: list[Tensor]
) -> ForwardBatch:
    """A batch of one sequence on pages of one token, with logits after every token."""
    num_new, end = len(tokens), start + len(tokens)
    host = AttentionMetadata(
        start=np.array([start]),
        qo_indptr=np.array([0, num_new]),
        kv_indptr=np.array([0, end]),
        seq_lens=np.array([end]),
        page_tables=[pages],
    )
    return ForwardBatch(
        input_ids=tokens.to(device),
        positions=torch.arange(start, end, device=device),
        slot_mapping=torch.from_numpy(pages[start:].astype(np.int64)).to(device),
        logits_indices=torch.arange(num_new, device=device),
        host=host,
        page_size=1,
        recurrent=_states_of_one_row(start, num_new, device, states),
    )


def _states_of_one_row(
    start: int, num_new: int, device: torch.device, states: list[Tensor]
) -> RecurrentRows:
    if start and num_new == 1:
        state_ids = torch.zeros(1, dtype=torch.int64, device=device)
        return RecurrentRows(states, RecurrentTokens(state_ids), ())
    row = RecurrentRow(0, start == 0, (RecurrentPiece(0, num_new, -1),))
    return RecurrentRows(states, None, (row,))
