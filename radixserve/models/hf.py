"""Every other decoder: transformers' own modelling code with its attention function replaced.

The rows of a step are one sequence [1, T] with their own positions and without a mask; each
attention layer calls `_attention`, which passes q, k, v to the backend of the call. Not every
architecture hands keyword arguments down to its attention, so that the backend lies in a `_Slot`
that the model's own modules carry. A model that cannot run so is refused at load: by rule where the
config shows it, by a probe that looks at the arguments of the attention function, and by comparing
a few tokens with the model's eager attention, which finds what rule and probe missed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, HostIndex
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.errors import ModelNotSupported, RadixServeError
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.weights import (
    architecture_of,
    check_sliding_window,
    read_eos_ids,
    tensor_files,
)

ATTENTION_NAME = "radixserve"  # in transformers' registry of attention functions
NUM_CHECKED = 13  # tokens of the comparison with eager attention
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}  # of the logits' norm
UNPLACED_ROPE = ("dynamic", "longrope")  # depend on the longest sequence in the batch
REFUSED_ARGUMENTS = {  # what a model may hand to its attention, and what that means
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias added to attention scores",
    "alibi": "ALiBi position biases",
    "head_mask": "masked attention heads",
}


class _Slot:
    """Holds the backend of the call in progress; one for each loaded model, on its modules."""

    def __init__(self, model: Any) -> None:
        self.backend: Any = None
        for module in model.modules():
            module.radixserve_slot = self

    @contextmanager
    def holding(self, backend: AttentionBackend | _Probe) -> Iterator[None]:
        self.backend = backend
        try:
            yield
        finally:
            self.backend = None


class TransformersModel(LanguageModel):
    """See `LanguageModel`. Made by `load_transformers`."""

    def __init__(self, model: Any, slot: _Slot, info: ModelInfo) -> None:
        self.info = info
        self._model, self._slot = model, slot
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        wanted = {"logits_to_keep": batch.logits_indices} if self._keeps_logits else {}
        with self._slot.holding(backend):
            logits: Tensor = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **wanted,
            ).logits[0]
        if not self._keeps_logits:
            logits = logits.index_select(0, batch.logits_indices)
        return logits.float()


def _attention(
    module: Any,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns [1, T, Hq, D] and no weights."""
    backend = module.radixserve_slot.backend
    if isinstance(backend, _Probe):
        backend.note(module, query, key, value, attention_mask, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    return backend.run(q, k, v, module.layer_idx, scaling)[None], None


class _Probe:
    """Stands in for a backend: attends over one sequence, notes what it is handed."""

    name = "probe"

    def __init__(self, architecture: str, max_positions: int) -> None:
        self.architecture, self._max_positions = architecture, max_positions
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> (Hq, Hkv, D)

    def plan(self, batch: ForwardBatch) -> None:
        pass

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None = None
    ) -> Tensor:
        del layer
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def note(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        """Raise ModelNotSupported if the layer wants more than plain causal attention."""
        wanted = [
            what for name, what in REFUSED_ARGUMENTS.items() if arguments.get(name) is not None
        ]
        window = arguments.get("sliding_window")
        if window is not None and window < self._max_positions:
            wanted.append(f"sliding window attention over {window} positions")
        if mask is not None:
            wanted.append("an attention mask of its own")
        if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            wanted.append("attention that is not causal")
        if key.shape[-1] != value.shape[-1]:
            wanted.append(f"values of {value.shape[-1]} features beside keys of {key.shape[-1]}")
        layer: int | None = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            wanted.append("attention layers without a number of their own")
        if wanted or layer is None:
            raise ModelNotSupported(f"{self.architecture} needs {', '.join(wanted)}")
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[-1])


def load_transformers(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Load any decoder-only checkpoint through transformers.

    Raises ModelNotSupported naming the reason if the model needs more than causal attention over
    all earlier positions, or if its results would differ from transformers' own.
    """
    check_architecture(config)
    tensor_files(folder)
    model = _read_model(folder, config, dtype).to(device).eval().requires_grad_(False)
    architecture = architecture_of(config)
    max_positions: int = config.max_position_embeddings
    slot = _Slot(model)
    with torch.inference_mode(), slot.holding(_Probe(architecture, max_positions)):
        num_heads, num_kv_heads, head_dim = _probe(model, slot.backend, device)
    info = ModelInfo(
        architecture=architecture,
        is_native=False,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_positions=max_positions,
        eos_ids=read_eos_ids(folder, config),
        dtype=dtype,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )
    wrapped = TransformersModel(model, slot, info)
    is_current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), is_current:
        _compare_with_eager(wrapped, model, device)
    return wrapped


def check_architecture(config: Any) -> None:
    """Raise ModelNotSupported for what the config alone shows to be impossible."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = architecture_of(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name} is an encoder-decoder; only decoders can be run")
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = known.get(type(config), None)
    if model_class is None or model_class.__name__ != name:
        raise ModelNotSupported(f"{name} is not a causal language model that transformers knows")
    check_sliding_window(config)
    _check_fields(name, config)


def _check_fields(name: str, config: Any) -> None:
    reasons = {
        "attn_logit_softcapping": "soft-capped attention scores",
        "attention_chunk_size": "attention in chunks",
        "quantization_config": "quantized weights",
    }
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


def _read_model(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model with its weights, ready to call `_attention`; every tensor accounted for."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, _attention)  # the same function each time
    auto_model: Any = AutoModelForCausalLM
    try:
        model, loading = auto_model.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise ModelNotSupported(f"transformers cannot load {folder}: {error!r}") from error
        raise ModelNotSupported(
            f"{architecture_of(config)} does not use transformers' attention interface"
        ) from error
    except Exception as error:
        raise ModelNotSupported(f"transformers cannot load {folder}: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loading.get(what) or ())
        if names:
            raise ModelNotSupported(
                f"checkpoint {folder}: {what.replace('_keys', ' tensors')}: {', '.join(names[:6])}"
            )
    return model


def _probe(model: Any, probe: _Probe, device: torch.device) -> tuple[int, int, int]:
    """(Hq, Hkv, D) of every layer. Raises ModelNotSupported if layers differ or do not attend."""
    architecture = probe.architecture
    tokens = torch.arange(4, device=device)[None]
    try:
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except RadixServeError:
        raise
    except Exception as error:
        raise ModelNotSupported(
            f"{architecture} cannot run with another attention function: {error}"
        ) from error
    num_layers = model.config.num_hidden_layers
    if not probe.shapes:
        raise ModelNotSupported(f"{architecture} does not use transformers' attention interface")
    if sorted(probe.shapes) != list(range(num_layers)):
        raise ModelNotSupported(
            f"{architecture} attends in layers {sorted(probe.shapes)} of {num_layers}; "
            "linear attention and state space layers cannot be run"
        )
    shapes = set(probe.shapes.values())
    if len(shapes) > 1:
        raise ModelNotSupported(f"{architecture} has layers of different head shapes: {shapes}")
    return shapes.pop()


def _compare_with_eager(wrapped: TransformersModel, model: Any, device: torch.device) -> None:
    """Raise ModelNotSupported if chunks through the cache differ from eager attention."""
    info = wrapped.info
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(info.vocab_size, (NUM_CHECKED,), generator=generator)
    paged = _run_in_chunks(wrapped, tokens, device)
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


def _run_in_chunks(wrapped: TransformersModel, tokens: Tensor, device: torch.device) -> Tensor:
    """Logits [n, V] of all tokens, computed in three chunks over scattered pages of one token."""
    info = wrapped.info
    size = len(tokens)
    shape = (info.num_layers, 2, size, 1, info.num_kv_heads, info.head_dim)
    make = TritonBackend if info.dtype == torch.float16 else ReferenceBackend
    backend = make(torch.zeros(shape, dtype=info.dtype, device=device), info.num_heads)
    pages = np.arange(size)[::-1].astype(np.int32)
    parts = []
    for start, end in ((0, 6), (6, size - 1), (size - 1, size)):
        batch = _one_row(tokens[start:end], start, pages[:end], device)
        backend.plan(batch)
        parts.append(wrapped.forward(batch, backend))
    return torch.cat(parts)


def _one_row(tokens: Tensor, start: int, pages: np.ndarray, device: torch.device) -> ForwardBatch:
    """A batch of one sequence on pages of one token, with logits after every token."""
    num_new, end = len(tokens), start + len(tokens)
    host = HostIndex(
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
    )
