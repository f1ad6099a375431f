"""Recurrent layers of transformers' models (state spaces, gated delta nets, linear attention, short
convolutions): their mixers run row by row, each from the state of its own sequence.

transformers' mixers read their state from a cache object and write it back, after any number of
tokens. `RowState` is that object; `Mixer` replaces the mixer's `forward`.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import RecurrentRow, RecurrentRows, RecurrentTokens
from radixserve.errors import ModelNotSupported
from radixserve.models.base import StateShape

CONV, RECURRENT = "conv", "recurrent"
_CALLS = {"update_conv_state", "update_recurrent_state"}  # of a mixer to its cache
_STATELESS_SCAN = "mamba_selective_scan"  # Mamba-1's, which takes no state to begin with
# Of its argument; the first since transformers 5.24.
_CACHE_NAMES = "cache", "cache_params", "past_key_values"


class RowState:
    """One layer's states of one row or several, by kind and index, as a mixer sees them."""

    def __init__(self, states: dict[tuple[str, int], Tensor]) -> None:
        """`states`: each [rows, ...]; changed by the mixer, in place or not."""
        self.states = states

    def is_recording_past(self, layer_idx: int) -> bool:
        del layer_idx
        return False

    # What mixers asked for before they had get_conv_state (transformers 5.17).

    record_past = False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        del layer_idx, state_idx
        return bool(self.states)

    @property
    def layers(self) -> defaultdict[int, RowState]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {index: state for (kind, index), state in self.states.items() if kind == CONV}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {index: state for (kind, index), state in self.states.items() if kind == RECURRENT}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        del layer_idx
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        del layer_idx
        return self.states.get((RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The inputs [rows, C, n] of a convolution, after those that the state keeps."""
        del layer_idx, kwargs
        before = self.states.get((CONV, state_idx))
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            full = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size, full = before.shape[-1], torch.cat((before, conv_states), -1)
        self.states[CONV, state_idx] = full[..., -size:].clone()
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        del layer_idx, kwargs
        self.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states


class Mixers:
    """The mixers of one model: the shapes of their states, and the rows of the current call."""

    def __init__(self, model: Any) -> None:
        self.rows: RecurrentRows | None = None  # None: the mixer is called as it was
        self.probed_states: dict[int, list[StateShape]] | None = (
            None  # by layer, while the model is probed
        )
        self.places: dict[int, list[tuple[tuple[str, int], int]]] = {}  # by layer: kind and index,
        # and the place among RecurrentRows.states
        mixers = _mixers(model)
        # Tokens after a state run one by one: longer pieces would ignore it.
        self.is_stepwise = any(_STATELESS_SCAN in _names_used(type(module)) for module in mixers)
        self.layers = sorted(Mixer.wrap(self, module) for module in mixers)
        if len(set(self.layers)) < len(self.layers):
            raise ModelNotSupported("recurrent layers without a number of their own")

    def set_shapes(self) -> tuple[StateShape, ...]:
        """End the probe and return the shapes of all states, by layer."""
        assert self.probed_states is not None
        shapes = [
            shape for layer in sorted(self.probed_states) for shape in self.probed_states[layer]
        ]
        for place, shape in enumerate(shapes):
            self.places.setdefault(shape.layer, []).append(((shape.kind, shape.number), place))
        self.probed_states = None
        return tuple(shapes)


class Mixer:
    """A mixer's `forward` over the rows of a step."""

    def __init__(self, mixers: Mixers, layer: int, cache_name: str, call: Any) -> None:
        self._mixers, self._layer = mixers, layer
        self._cache_name, self._call = cache_name, call

    @classmethod
    def wrap(cls, mixers: Mixers, module: Any) -> int:
        """Replace the module's `forward`; the number of its layer."""
        parameters = inspect.signature(module.forward).parameters
        names = [name for name in _CACHE_NAMES if name in parameters]
        layer: int | None = getattr(module, "layer_idx", None)
        if layer is None or not names:
            raise ModelNotSupported(
                f"{type(module).__name__} keeps a state in a way that is not known"
            )
        module.forward = cls(mixers, layer, names[0], module.forward)
        _limit_time_steps(module)
        return layer

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, H]; returns the same shape."""
        mixers, rows = self._mixers, self._mixers.rows
        if rows is None and mixers.probed_states is None:
            out: Tensor = self._call(hidden_states, *args, **kwargs)
            return out
        plain = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
        plain.pop(self._cache_name, None)

        def run(inputs: Tensor, states: RowState) -> Tensor:
            out: Tensor = self._call(inputs, **{**plain, self._cache_name: states})
            return out

        if rows is None:
            return self._probe(hidden_states, run)
        return self._run_rows(hidden_states, rows, run)

    def _probe(self, hidden_states: Tensor, run: Callable[[Tensor, RowState], Tensor]) -> Tensor:
        state = RowState({})
        out = run(hidden_states, state)
        assert self._mixers.probed_states is not None
        self._mixers.probed_states[self._layer] = [
            StateShape(self._layer, kind, index, tuple(value.shape[1:]), value.dtype)
            for (kind, index), value in sorted(state.states.items())
        ]
        return out

    def _run_rows(
        self, hidden_states: Tensor, rows: RecurrentRows, run: Callable[[Tensor, RowState], Tensor]
    ) -> Tensor:
        """Rows of one token together; of the others one piece after the other.

        Nothing here waits for a device, or sends it an index.
        """
        tokens = rows.tokens
        if tokens is not None and tokens.places is None:
            together = hidden_states.transpose(0, 1)
            return self._run_tokens(together, rows.states, tokens, run).transpose(0, 1)
        out = torch.empty_like(hidden_states)
        if tokens is not None:
            assert tokens.places is not None
            together = hidden_states[0].index_select(0, tokens.places)[:, None]
            computed = self._run_tokens(together, rows.states, tokens, run)[:, 0]
            out[0].index_copy_(0, tokens.places, computed.to(out.dtype))
        for row in rows.rows:
            state, is_new = self._load(rows.states, row), row.is_new
            for start, end, kept_in in row.pieces:
                size = 1 if self._mixers.is_stepwise and not is_new else end - start
                for first in range(start, end, size):
                    some = slice(first, first + size)
                    out[:, some] = run(hidden_states[:, some], state)
                is_new = False
                if kept_in >= 0:
                    self._store(rows.states, state, kept_in)
            self._store(rows.states, state, row.state_id)
        return out

    def _run_tokens(
        self,
        hidden_states: Tensor,
        states: Sequence[Tensor],
        tokens: RecurrentTokens,
        run: Callable[[Tensor, RowState], Tensor],
    ) -> Tensor:
        """hidden_states [N, 1, H], a token of each row; returns the same shape."""
        updated = {}
        for key, place in self._mixers.places[self._layer]:
            state = states[place].index_select(0, tokens.state_ids)
            if tokens.new_rows is not None:
                state.index_fill_(0, tokens.new_rows, 0)
            updated[key] = state
        after = RowState(updated)
        out = run(hidden_states, after)
        written = tokens.state_ids if tokens.written_ids is None else tokens.written_ids
        for key, place in self._mixers.places[self._layer]:
            value = after.states[key].to(states[place].dtype)
            states[place].index_copy_(0, written, value)
            if tokens.kept_rows is not None and tokens.kept_in is not None:
                kept = value.index_select(0, tokens.kept_rows)
                states[place].index_copy_(0, tokens.kept_in, kept)
        return out

    def _load(self, states: Sequence[Tensor], row: RecurrentRow) -> RowState:
        """A copy of one row's state."""
        make: Callable[[Tensor], Tensor] = torch.zeros_like if row.is_new else torch.clone
        some = slice(row.state_id, row.state_id + 1)
        places = self._mixers.places[self._layer]
        return RowState({key: make(states[place][some]) for key, place in places})

    def _store(self, states: Sequence[Tensor], state: RowState, state_id: int) -> None:
        for key, place in self._mixers.places[self._layer]:
            states[place][state_id].copy_(state.states[key][0])


def _limit_time_steps(mixer: Any) -> None:
    """Mamba-2: transformers applies `time_step_limit` to sequences but not to single tokens; here
    the projected steps, which come last, are limited before either."""
    low, high = getattr(mixer, "time_step_limit", (0.0, math.inf))
    if (low, high) == (0.0, math.inf):
        return

    def limit(_module: Any, _args: Any, projected: Tensor) -> Tensor:
        bias = mixer.dt_bias
        bounds = _softplus_inverse(low) - bias, _softplus_inverse(high) - bias
        projected[..., -len(bias) :].clamp_(*(bound.to(projected.dtype) for bound in bounds))
        return projected

    mixer.in_proj.register_forward_hook(limit)


def _softplus_inverse(value: float) -> float:
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf


def _mixers(model: Any) -> list[Any]:
    modules = list(model.modules())
    is_mixer = {kind: bool(_CALLS & _names_used(kind)) for kind in set(map(type, modules))}
    return [module for module in modules if is_mixer[type(module)]]


def _names_used(kind: type) -> set[str]:
    """Attributes and globals named in the class's methods, decorated ones too."""
    names: set[str] = set()
    for member in vars(kind).values():
        if callable(member):
            function = inspect.unwrap(member)
            names.update(getattr(getattr(function, "__code__", None), "co_names", ()))
    return names
