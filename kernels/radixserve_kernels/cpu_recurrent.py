"""Recurrent layers and their states as the compiled decoder takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import address
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.state_space import StateSpace

_MATRICES_DIM = 4  # of [num_states, Hv, K, V]
_MAX_KERNEL = 8  # of cpu/recurrent.h
_DELTA_NET, _STATE_SPACE = range(2)  # as C numbers them
_TENSORS = ("conv", "conv_bias", "decay", "dt_bias", "skip", "norm")


class _Record(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("kind", "k_heads", "v_heads", "k_dim", "v_dim", "kernel", "first"),
                *("norm_size", "gates_first"),
            )
        ),
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *(
            (name, ctypes.c_float)
            for name in ("least_step", "most_step", "step_scale", "z_scale", "out_scale")
        ),
    )


class PackedRecurrence:
    """The own weights of a layer with a delta net or a state space; holds their memory.

    first: where its columns begin in the layer's fused product, after those of attention.
    """

    def __init__(self, net: DeltaNet | StateSpace, first: int = 0) -> None:
        assert net.kernel <= _MAX_KERNEL
        tensors: dict[str, Tensor | None]
        tensors = {name: getattr(net, name, None) for name in _TENSORS}
        if isinstance(net, DeltaNet):
            tensors["norm"] = net.norm.repeat(net.num_v_heads)
            sizes = net.num_k_heads, net.num_v_heads, net.k_dim, net.v_dim
            numbers = _DELTA_NET, *sizes, net.kernel, first, net.v_dim, False
            scales: tuple[float, ...] = 0.0, float("inf"), 1.0, 1.0, 1.0
        else:
            sizes = net.num_groups, net.num_heads, net.state_size, net.head_dim
            numbers = _STATE_SPACE, *sizes, net.kernel, first, net.norm_size, net.gates_first
            scales = *net.step_limits, net.step_scale, net.z_scale, net.out_scale
        held = [
            None if tensor is None else tensor.float().contiguous() for tensor in tensors.values()
        ]
        self._borrowed = held  # by C
        self.record = _Record(*numbers, *map(address, held), *scales)


class _ShortConvRecord(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("channels", "kernel")),
        ("weights", ctypes.c_void_p),
    )


class PackedShortConv:
    """The weights [kernel, C] of a gated short convolution; holds their memory."""

    def __init__(self, weights: Tensor) -> None:
        assert len(weights) <= _MAX_KERNEL
        self._weights = weights.float().contiguous()
        kernel, channels = self._weights.shape
        self.record = _ShortConvRecord(channels, kernel, self._weights.data_ptr())


class _LayerStates(ctypes.Structure):
    _fields_ = (("inputs", ctypes.c_void_p), ("matrices", ctypes.c_void_p))


class _StepStates(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "rows", "pieces")),
        ("num_rows", ctypes.c_int64),
    )


class CompiledStates:
    """The recurrent states of a step; holds the memory of the arrays."""

    def __init__(
        self,
        states: Sequence[Tensor],
        rows: NDArray[np.int64],
        pieces: NDArray[np.int64],
    ) -> None:
        """states: of each layer that has some the inputs [num_states, kernel - 1, C] of its
        convolution, and of a delta net its matrices, see `DeltaNet.state_shapes`. rows [R, 4]: a
        row's state before its tokens (-1: zeros), the one after, its first piece and the end of its
        pieces. pieces [P, 3]: its tokens [start, end) of the step, and the state that keeps the one
        after them, or -1.
        """
        layers: list[_LayerStates] = []
        for tensor in states:
            if tensor.dim() == _MATRICES_DIM:
                layers[-1].matrices = tensor.data_ptr()
            else:
                layers.append(_LayerStates(tensor.data_ptr(), None))
        records = (_LayerStates * len(layers))(*layers)
        self._borrowed = states, rows, pieces, records  # by C
        self.record = _StepStates(
            ctypes.addressof(records), rows.ctypes.data, pieces.ctypes.data, len(rows)
        )
