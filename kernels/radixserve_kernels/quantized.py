"""Weights of 8 and 4 bits, before they are packed for the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # numbers of a row that have a scale of their own
BITS = {
    "int8": 8.5,
    "int4": 5.0,
    "int4 (float scales)": 6.0,
    "float16": 16.0,
}  # a number, with its scales
CHUNK = 1 << 20  # numbers that are rounded at a time
FORMS = {"int8": 1, "int4": 2, "int4 (float scales)": 3}  # as C numbers them
FLOAT16 = 4  # weights in float16 beside activations in float32, the same
COMPACT = 5  # bfloat16 without room for an empty half of the last panel, the same


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K]: number * scale, and where there are minimums + minimum.

    int8: signed, scales float16. int4: 0 to 15, one a byte, scales and minimums float16, or float32
    where 16 bits do not hold them.
    """

    numbers: Tensor  # [N, K] int8 or uint8
    scales: Tensor  # [N, ceil(K / 32)] float16 or float32
    minimums: Tensor | None = None  # as scales

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def form(self) -> str:
        """A name of FORMS."""
        if self.minimums is None:
            return "int8"
        return "int4" if self.scales.dtype == torch.float16 else "int4 (float scales)"

    @classmethod
    def of_parts(cls, parts: Iterable[Tensor | None]) -> QuantizedTensor:
        """The opposite of `parts`."""
        numbers, scales, minimums = parts
        assert numbers is not None
        assert scales is not None
        return cls(numbers, scales, minimums)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.numbers, self.scales, self.minimums

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        num_columns = self.shape[1]
        each = self.numbers.float() * _spread(self.scales, num_columns)
        return each if self.minimums is None else each + _spread(self.minimums, num_columns)


AnyWeight = Tensor | QuantizedTensor


def dense(weight: AnyWeight) -> Tensor:
    """A weight that is not quantised, for code that knows it."""
    assert isinstance(weight, Tensor)
    return weight


def quantize_int8(weight: Tensor) -> QuantizedTensor:
    """[N, K] in the nearest 8 bits: of each 32 numbers the largest becomes 127 or -127.

    Raises ValueError for numbers that are not finite, or above 8 million: a scale has 16 bits.
    """
    size, depth = weight.shape
    numbers = torch.empty((size, depth), dtype=torch.int8)
    scales = torch.empty((size, -(-depth // BLOCK)), dtype=torch.float16)
    step = max(1, CHUNK // depth)
    for top in range(0, size, step):
        some = slice(top, top + step)
        _quantize_rows(weight[some], numbers[some], scales[some])
    return QuantizedTensor(numbers, scales)


def _quantize_rows(weight: Tensor, numbers: Tensor, scales: Tensor) -> None:
    size, depth = weight.shape
    blocks = weight.new_zeros((size, scales.shape[1] * BLOCK), dtype=torch.float32)
    blocks[:, :depth] = weight
    blocks = blocks.view(size, -1, BLOCK)
    scales.copy_(blocks.abs().amax(-1) / 127.0)
    if not scales.isfinite().all():
        raise ValueError("numbers that are not finite or too large for 8 bits")
    divisors = scales.float()[..., None].masked_fill_(scales[..., None] == 0, torch.inf)
    rounded = blocks.div_(divisors).round_().clamp_(-127, 127)
    numbers.copy_(rounded.view(size, -1)[:, :depth])


def to_int8(weight: AnyWeight) -> QuantizedTensor:
    """The nearest weight in 8 bits; itself if it is one. Raises ValueError, see `quantize_int8`."""
    if isinstance(weight, Tensor):
        return quantize_int8(weight)
    return weight if weight.minimums is None else quantize_int8(weight.dequantize())


def is_equal(first: AnyWeight, second: AnyWeight) -> bool:
    """Whether both have the same numbers in the same form."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second or (
            isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
        )
    pairs = zip(first.parts, second.parts, strict=True)
    return first.form == second.form and all(
        a is None or b is None or torch.equal(a, b) for a, b in pairs
    )


def select_rows(weight: AnyWeight, index: Tensor) -> AnyWeight:
    """The rows of `index`, in its order."""

    def select(part: Tensor) -> Tensor:
        if part.is_meta:  # where an index imports torch._dynamo and sympy, which takes a second
            return part.new_empty((len(index), *part.shape[1:]))
        return part[index]

    return map_parts(weight, select)


def map_parts(weight: AnyWeight, change: Callable[[Tensor], Tensor]) -> AnyWeight:
    """`change` of the weight, or of each tensor of a quantised one, which all begin with N."""
    if isinstance(weight, Tensor):
        return change(weight)
    return QuantizedTensor.of_parts(None if part is None else change(part) for part in weight.parts)


def concat_rows(weights: Sequence[AnyWeight]) -> AnyWeight:
    """The weights [n, K] one below the other: all dense, or all of one form."""
    if len(weights) == 1:
        return weights[0]
    if isinstance(weights[0], Tensor):
        return torch.cat([dense(weight) for weight in weights])
    parts = [weight.parts for weight in weights if isinstance(weight, QuantizedTensor)]
    columns = zip(*parts, strict=True)
    return QuantizedTensor.of_parts(
        None if some[0] is None else torch.cat(some) for some in columns
    )


def form_of(weight: AnyWeight) -> str:
    """The name of a weight's form: of FORMS, or its dtype."""
    if isinstance(weight, QuantizedTensor):
        return weight.form
    return str(weight.dtype).removeprefix("torch.")


def _spread(scales: Tensor, num_columns: int) -> Tensor:
    """One a block to one a number."""
    return scales.float().repeat_interleave(BLOCK, 1)[:, :num_columns]
