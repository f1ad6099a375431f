"""Layers with a state: their kernels and references against the plain arithmetic in float64, which
state is read and written, and the same bits however tokens are divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve_kernels import gpu_ops
from radixserve_kernels.delta_net import DeltaNet, run_delta_net
from radixserve_kernels.gpu.records import StateRows
from radixserve_kernels.state_space import StateSpace, run_state_space

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
NUM_STATES = 12
EPS = 1e-6
LENGTHS = (1, 9, 2, 1, 3)  # tokens of each row
READ = (3, -1, 4, -1, 5)  # two rows begin
WRITTEN = (3, 1, 6, -1, 5)  # in place, elsewhere, nowhere
KEPT = {0: 7, 4: 8, 9: 9, 11: 10, 14: 0, 15: 2}  # of tokens, inside rows and at their ends


@dataclass
class Case:
    """A layer and how its plain form runs one sequence."""

    net: DeltaNet | StateSpace | Tensor
    columns: int
    shapes: tuple[tuple[int, ...], ...]
    plain: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]

    def run(self, rows: Tensor, states: StateRows, tensors: list[Tensor]) -> Tensor:
        if isinstance(self.net, Tensor):
            return gpu_ops.short_conv(self.net, rows, states, tensors[0])
        return gpu_ops.recurrence(self.net, rows, states, tensors[0], tensors[1], EPS)


def delta_net(num_k: int, num_v: int, k_dim: int, v_dim: int, kernel: int) -> Case:
    channels, values = 2 * num_k * k_dim + num_v * v_dim, num_v * v_dim
    net = DeltaNet(
        *(num_k, num_v, k_dim, v_dim),
        conv=torch.randn(kernel, channels),
        decay=-torch.rand(num_v),
        dt_bias=torch.randn(num_v),
        norm=torch.randn(v_dim),
    )

    def plain(rows: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out, *after = run_delta_net(net, rows, before[0], before[1], EPS)
        return out, after

    return Case(net, channels + values + 2 * num_v, net.state_shapes, plain)


def state_space(
    groups: int, heads: int, size: int, head_dim: int, kernel: int, norm: int, *, first: bool
) -> Case:
    channels, values = 2 * groups * size + heads * head_dim, heads * head_dim
    net = StateSpace(
        *(groups, heads, size, head_dim),
        conv=torch.randn(kernel, channels),
        conv_bias=torch.randn(channels) if first else None,
        decay=-torch.rand(heads),
        dt_bias=3 * torch.randn(heads) - 4,
        skip=torch.randn(heads),
        norm=torch.randn(values) if norm else None,
        norm_size=norm,
        gates_first=first,
        step_limits=(0.01, 1.5) if first else (0.0, float("inf")),
        step_scale=0.7,
        z_scale=1.3,
    )

    def plain(rows: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out, *after = run_state_space(net, rows, before[0], before[1], EPS)
        return out, after

    return Case(net, channels + values + heads, net.state_shapes, plain)


def short_conv(channels: int, kernel: int) -> Case:
    weights = torch.randn(kernel, channels)

    def plain(rows: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        b, c, x = rows.float().chunk(3, -1)
        whole = torch.cat((before[0], b * x))
        mixed = F.conv1d(whole.T[None], weights.T[:, None], groups=channels)[0].T
        return c * mixed, [whole[len(whole) - kernel + 1 :]]

    return Case(weights, 3 * channels, ((kernel - 1, channels),), plain)


CASES: dict[str, Callable[[], Case]] = {
    "delta net": lambda: delta_net(2, 4, 16, 16, 4),
    "delta net, odd sizes": lambda: delta_net(1, 3, 12, 40, 3),
    "state space": lambda: state_space(2, 4, 16, 16, 4, 32, first=True),
    "state space, norm first": lambda: state_space(1, 1, 12, 40, 3, 40, first=False),
    "state space without a norm": lambda: state_space(2, 6, 8, 20, 2, 0, first=True),
    "short convolution": lambda: short_conv(40, 3),
    "short convolution, many channels": lambda: short_conv(150, 4),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(5)
    return CASES[request.param]()


def state_rows(
    lengths: tuple[int, ...],
    read: tuple[int, ...],
    written: tuple[int, ...],
    kept: dict[int, int],
) -> StateRows:
    everywhere = [kept.get(token, -1) for token in range(sum(lengths))]
    bounds = [0, *itertools.accumulate(lengths)]
    return StateRows(
        *(torch.tensor(ids, dtype=torch.int32) for ids in (bounds, read, written, everywhere))
    )


def random_states(case: Case) -> list[Tensor]:
    return [torch.randn(NUM_STATES, *shape) for shape in case.shapes]


def expected_of(
    case: Case, rows: Tensor, states: StateRows, tensors: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """What each row gives by itself, and all states afterwards."""
    after, outs = [tensor.clone() for tensor in tensors], []
    bounds = itertools.pairwise(states.indptr.tolist())
    for (start, end), read, written in zip(
        bounds, states.read.tolist(), states.written.tolist(), strict=True
    ):
        before = [torch.zeros_like(x[0]) if read < 0 else x[read] for x in tensors]
        outs.append(case.plain(rows[start:end], before)[0])
        goals = [(end, written), *((i + 1, int(states.kept[i])) for i in range(start, end))]
        for stop, state_id in goals:
            if state_id >= 0:
                states_after = case.plain(rows[start:stop], before)[1]
                for tensor, state in zip(after, states_after, strict=True):
                    tensor[state_id] = state
    return torch.cat(outs), after


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_states(case: Case, dtype: torch.dtype) -> None:
    states = state_rows(LENGTHS, READ, WRITTEN, KEPT)
    rows = torch.randn(sum(LENGTHS), case.columns + 5).to(dtype)[:, 3:-2]
    tensors = random_states(case)
    wanted, after = expected_of(case, rows, states, tensors)
    out = case.run(rows, states, tensors)
    assert out.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)
    touched = {*WRITTEN, *KEPT.values()} - {-1}
    for tensor, state in zip(tensors, after, strict=True):
        torch.testing.assert_close(tensor, state, rtol=1e-4, atol=1e-5)
        others = [number for number in range(NUM_STATES) if number not in touched]
        assert torch.equal(tensor[others], state[others])


@both
def test_the_same_bits_however_tokens_are_divided(case: Case) -> None:
    """One row of 7 tokens at once, in chunks, token by token, and among other rows."""
    rows = torch.randn(7, case.columns)
    tensors = random_states(case)
    whole = [tensor.clone() for tensor in tensors]
    keep = {2: 8, 4: 9}
    expected = case.run(rows, state_rows((7,), (3,), (3,), keep), whole)
    for sizes in ((2, 4, 1), (1,) * 7):
        parts = [tensor.clone() for tensor in tensors]
        first, outs = 0, []
        for size in sizes:
            kept = {place - first: kept_in for place, kept_in in keep.items() if place >= first}
            step = state_rows((2, size), (5, 3), (5, 3), {2 + at: id_ for at, id_ in kept.items()})
            among = torch.cat((torch.randn(2, case.columns), rows[first : first + size]))
            outs.append(case.run(among, step, parts)[2:])
            first += size
        assert torch.equal(torch.cat(outs), expected)
        for part, tensor in zip(parts, whole, strict=True):
            assert torch.equal(part[[3, 8, 9]], tensor[[3, 8, 9]])


@both
def test_padding_writes_nothing(case: Case) -> None:
    tensors = random_states(case)
    before = [tensor.clone() for tensor in tensors]
    rows = torch.randn(3, case.columns)
    out = case.run(rows, state_rows((1, 1, 1), (-1,) * 3, (-1,) * 3, {}), tensors)
    assert out.isfinite().all()
    assert all(map(torch.equal, tensors, before))


@both
def test_small_steps_keep_their_precision() -> None:
    """log(1 + exp(x)) of x far below zero, where 1 + exp(x) is 1 in float32."""
    case = state_space(1, 4, 8, 16, 2, 0, first=False)
    assert isinstance(case.net, StateSpace)
    case.net = replace(case.net, dt_bias=torch.tensor([-30.0, -18.0, -12.0, 25.0]), step_scale=0.1)
    case.net.skip.zero_()
    rows, states = torch.randn(1, case.columns), state_rows((1,), (-1,), (0,), {})
    tensors = random_states(case)
    case.run(rows, states, tensors)
    zeros = [torch.zeros(shape) for shape in case.shapes]
    after = run_state_space(case.net, rows, zeros[0], zeros[1], EPS)[2]
    torch.testing.assert_close(tensors[1][0], after, rtol=1e-4, atol=0.0)


@both
def test_sigmoid_gate() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 2 * 1_030).to(dtype)
        x, gate = wide.chunk(2, -1)
        expected = x.double() * gate.double().sigmoid()
        gated = gpu_ops.sigmoid_gate(x, gate)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(gated.double(), expected, rtol=4 * step, atol=4 * step)
        gpu_ops.sigmoid_gate(x, gate, x)
        assert torch.equal(x, gated)
