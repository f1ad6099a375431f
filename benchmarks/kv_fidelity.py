"""How far K and V in 8 bits move a model's distributions, beside llama.cpp's K and V in q8_0.

    python benchmarks/kv_fidelity.py [--model smollm2] [--num-tokens 20000] [--window 1024]
        [--weights widened,file] [--libraries DIR] [--forms] [--outliers] [--text FILE] [--json]

Text is cut into windows; the first half of each is context only. Each distribution after it is
compared with that of the same engine and weights where only K and V have another dtype, bfloat16
in radixserve and float16 in llama.cpp: KL divergence in nats, the share of tokens whose most likely
successor is the same, perplexity. Intervals of 95 % are those of 2,000 resamplings of the windows;
the last line of each kind of weights compares both engines window by window. By default the text
is that of modules of Python's standard library.

weights      widened: float32, activations too, so that nothing else is rounded. file: as they are
             stored, where each engine rounds activations to 8 bits as well
--libraries  the folder of llama.cpp's shared libraries, which needs a GGUF file:
             `npm install @node-llama-cpp/linux-x64` has them in bins/linux-x64
--forms      ways to store 8 bits, rounded by PyTorch under widened weights: a scale for each head
             or for 32 numbers, heads multiplied with a Hadamard matrix, keys before rotary; and
             float8_e4m3fn as devices store it
--outliers   the same of int8 where one head of each layer has two channels of keys that are larger
             by a factor, and its queries smaller: the same model, but for rounding. Says how much
             the keys of the worst head are rounded, as the warning at run time does
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from engine.base import Unavailable
from engine.llama_library import LlamaLibrary
from fidelity import Tally, read_windows
from harness.arguments import Names, parse
from harness.cpu_model import CpuModel
from harness.report import Cell, print_table
from torch import Tensor

from radixserve.attention.base import AttentionFeatures, ForwardBatch
from radixserve.attention.reference import ReferenceBackend
from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.decoder import Decoder, load_decoder
from radixserve.models.source import ModelSource, find_model
from radixserve.runner.input_batch import build_forward_batch
from radixserve.runner.rounding_check import FIRST_TOKEN, key_errors
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.stored_kv import from_stored, multiply_hadamard, to_stored

CPU = torch.device("cpu")
COLUMNS = (
    "weights",
    "K and V",
    "KL mean",
    "+-",
    "KL at 99 %",
    "same best token %",
    "+-",
    "perplexity",
)
WEIGHTS = {"widened": (torch.float32, None), "file": (torch.bfloat16, "auto")}  # of radixserve
OURS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
OUTLIERS = (1, 4, 16, 64, 256)
OUTLIER_CHANNELS = [10, 11]
LLAMA = {"f16": 1, "q8_0": 8}  # numbers of ggml's types
RESAMPLINGS = 2_000
Logprobs = Callable[[list[int], int], Tensor]  # [n, V] after the last n of some tokens
Rounding = Callable[[Tensor], Tensor]  # of K or V [T, Hkv, D]


class WindowTally(Tally):
    """A form's figures by window."""

    def __init__(self) -> None:
        super().__init__()
        self.kl: list[float] = []  # means
        self.same: list[float] = []  # shares

    def add(self, p: Tensor, q: Tensor, tokens: list[int]) -> None:
        super().add(p, q, tokens)
        self.kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        self.same.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))

    def row(self) -> list[Cell]:
        mean, worst, same, perplexity = self.cells()
        kl = f"{half_interval(self.kl):.5f}"
        return [mean, kl, worst, same, f"{100 * half_interval(self.same):.2f}", perplexity]


def half_interval(values: list[float]) -> float:
    """Half the interval of 95 % of the mean, by resampling."""
    array = np.array(values)
    rng = np.random.default_rng(0)
    means = array[rng.integers(0, len(array), (RESAMPLINGS, len(array)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(high - low) / 2


def compiled(model: CpuDecoder, kv_dtype: torch.dtype) -> Logprobs:
    def logprobs(tokens: list[int], count: int) -> Tensor:
        rows = CpuModel(model, 1, len(tokens), kv_dtype)
        return rows.forward(range(1), np.array(tokens, np.int32), 0, count).log_softmax(-1)

    return logprobs


def of_llama(file: Path, kind: int, args: argparse.Namespace) -> Logprobs:
    """Raises Unavailable."""
    llama = LlamaLibrary(args.libraries, file, args.window, args.threads, kind)

    def logprobs(tokens: list[int], count: int) -> Tensor:
        return torch.from_numpy(llama.last_logits(tokens, count)).log_softmax(-1)

    return logprobs


class RoundingBackend(ReferenceBackend):
    """Attention in float32 to K and V that were rounded when they were stored."""

    def __init__(self, model: Decoder, num_tokens: int, keys: Rounding, values: Rounding) -> None:
        info = model.info
        shape = (info.num_layers, 2, num_tokens, 1, info.num_kv_heads, info.head_dim)
        super().__init__(torch.zeros(shape), info.num_heads)
        self._roundings = keys, values

    def _attend(self, q: Tensor, layer: int, scale: float, features: AttentionFeatures) -> Tensor:
        for slots, rounding in zip(self.slots[layer], self._roundings, strict=True):
            slots[:] = rounding(slots)
        return super()._attend(q, layer, scale, features)


def by_torch(model: Decoder, keys: Rounding, values: Rounding) -> Logprobs:
    """Each window is one step, so that every slot is rounded once in each layer."""

    @torch.inference_mode()
    def logprobs(tokens: list[int], count: int) -> Tensor:
        backend = RoundingBackend(model, len(tokens), keys, values)
        batch = step_of(tokens, count)
        backend.plan(batch)
        return model.forward(batch, backend).float().log_softmax(-1)

    return logprobs


def step_of(tokens: list[int], count: int) -> ForwardBatch:
    ids = np.array(tokens, np.int32)
    pages = np.arange(len(tokens), dtype=np.int32)
    return build_forward_batch([ScheduledRequest("", ids, 0, pages, None, ids[-count:])], 1, CPU)


def by_head(x: Tensor) -> Tensor:
    """A scale for each head."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x / scale).round() * scale


def by_32(x: Tensor) -> Tensor:
    """A scale for each 32 numbers, a float16, as in q8_0."""
    parts = x.unflatten(-1, (-1, 32))
    scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((parts / scale).round() * scale.half().to(x.dtype)).flatten(-2)


def by_fp8(x: Tensor) -> Tensor:
    """As devices store it, without a scale."""
    return from_stored(to_stored(x, torch.float8_e4m3fn), x.dtype)


def spread(rounding: Rounding) -> Rounding:
    """Rounds what a Hadamard matrix makes of a head."""
    return lambda x: multiply_hadamard(rounding(multiply_hadamard(x)))


def before_rotary(model: Decoder, rounding: Rounding) -> Rounding:
    """Rounds keys, of positions from 0 on, as they are before they are rotated."""
    (table,) = model.tables

    def turn(x: Tensor, sign: int) -> Tensor:
        cos, sin = table[: len(x), None].chunk(2, -1)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * cos - sign * odd * sin, sign * even * sin + odd * cos
        return torch.stack(turned, -1).flatten(-2)

    return lambda x: turn(rounding(turn(x, -1)), 1)


def other_forms(model: Decoder) -> dict[str, Logprobs]:
    """The first is the reference."""
    keys = {
        "bfloat16 (torch)": to_bfloat16,
        "by head": by_head,
        "by 32": by_32,
        "by head, Hadamard (kv_dtype int8)": spread(by_head),
        "by 32, Hadamard": spread(by_32),
        "fp8_e4m3 (kv_dtype fp8_e4m3)": by_fp8,
    }
    forms = {name: by_torch(model, rounding, rounding) for name, rounding in keys.items()}
    if len(model.tables) == 1:
        forms["by head, keys before rotary"] = by_torch(
            model, before_rotary(model, by_head), by_head
        )
        forms["by head, Hadamard, keys before rotary"] = by_torch(
            model, before_rotary(model, spread(by_head)), spread(by_head)
        )
    return forms


def outlier_forms(model: Decoder, worst: dict[str, float]) -> dict[str, Logprobs]:
    """The first is the reference. worst: gets the largest of `key_errors` by name."""
    rounding = spread(by_head)

    def larger(factor: float, name: str) -> Rounding:
        factors = torch.ones(model.info.num_kv_heads, model.info.head_dim)
        factors[len(factors) // 2, OUTLIER_CHANNELS] = factor

        def round_keys(x: Tensor) -> Tensor:
            errors, _ = key_errors(
                to_stored(x[FIRST_TOKEN:] * factors, torch.int8), scales_last=False
            )
            worst[name] = max(worst.get(name, 0.0), float(errors.max()))
            return rounding(x * factors) / factors

        return round_keys

    forms = {"bfloat16 (torch)": by_torch(model, to_bfloat16, to_bfloat16)}
    for factor in OUTLIERS:
        name = f"int8, two channels x {factor}"
        forms[name] = by_torch(model, larger(factor, name), rounding)
    return forms


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def compare(
    windows: list[list[int]], forms: dict[str, Logprobs], title: str
) -> dict[str, WindowTally]:
    """Of each form, beside the first."""
    tallies = {name: WindowTally() for name in forms}
    for number, tokens in enumerate(windows):
        half = tokens[len(tokens) // 2 :]
        expected = None
        for name, logprobs in forms.items():
            own = logprobs(tokens, len(half))
            expected = own if expected is None else expected
            tallies[name].add(expected, own, half)
        print(f"{title}: window {number + 1} of {len(windows)}", file=sys.stderr, flush=True)
    return tallies


def difference(ours: WindowTally, theirs: WindowTally) -> str:
    """Of int8 to q8_0, paired by windows."""
    kl = [a - b for a, b in zip(ours.kl, theirs.kl, strict=True)]
    same = [100 * (a - b) for a, b in zip(ours.same, theirs.same, strict=True)]
    return (
        f"int8 less q8_0: KL {np.mean(kl):+.5f} +- {half_interval(kl):.5f}, "
        f"same best token {np.mean(same):+.2f} +- {half_interval(same):.2f} points"
    )


@contextmanager
def widened_file(path: Path) -> Iterator[Path]:
    """A GGUF file with the numbers of another in float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    with tempfile.TemporaryDirectory(prefix="kv-fidelity-") as folder:
        widened = Path(folder) / "widened.gguf"
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(widened, architecture)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            kind, *of_items = field.types
            writer.add_key_value(name, field.contents(), kind, of_items[-1] if of_items else None)
        for tensor in reader.tensors:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield widened


def measure(
    source: ModelSource, weights: str, windows: list[list[int]], args: argparse.Namespace
) -> tuple[list[list[Cell]], list[str]]:
    """Rows of the table, and lines after it."""
    dtype, weight_dtype = WEIGHTS[weights]
    model = load_cpu_decoder(source, dtype, weight_dtype)
    names = [name for name, kv in OURS.items() if kv != torch.float32 or dtype == torch.float32]
    ours = {f"radixserve, {name}": compiled(model, OURS[name]) for name in names}
    tallies = compare(windows, ours, f"radixserve, {weights}")
    lines: list[str] = []
    if args.libraries:
        assert source.path is not None
        path = Path(source.path)
        with widened_file(path) if weights == "widened" else _as_it_is(path) as file:
            theirs = {f"llama.cpp, {n}": of_llama(file, kind, args) for n, kind in LLAMA.items()}
            beside = compare(windows, theirs, f"llama.cpp, {weights}")
        gap = difference(tallies["radixserve, int8"], beside["llama.cpp, q8_0"])
        lines.append(f"{weights}: {gap}")
        tallies |= beside
    if (args.forms or args.outliers) and weights == "widened":
        del model, ours
        torch_model = load_decoder(source, torch.float32, CPU)
        if args.forms:
            tallies |= compare(windows, other_forms(torch_model), "other forms")
        if args.outliers:
            worst: dict[str, float] = {}
            tallies |= compare(windows, outlier_forms(torch_model, worst), "outliers")
            lines += [f"{name}: keys of a head are rounded by {x:.3f}" for name, x in worst.items()]
    return [[weights, name, *tally.row()] for name, tally in tallies.items()], lines


@contextmanager
def _as_it_is(path: Path) -> Iterator[Path]:
    yield path


def main() -> None:
    numbers = {"num_tokens": 20_000, "window": 1_024, "threads": 1}
    args = parse(
        *(__doc__,),
        model="smollm2",
        weights=Names("kind of weights", WEIGHTS),
        libraries=Path,
        forms=False,
        outliers=False,
        text=Path,
        json=False,
        **numbers,
    )
    torch.set_num_threads(args.threads)
    source = find_model(args.model)
    windows = list(read_windows(source, args.text, args.num_tokens, args.window))
    table: list[list[Cell]] = []
    lines: list[str] = []
    for weights in args.weights:
        try:
            rows, more = measure(source, weights, windows, args)
        except Unavailable as error:
            raise SystemExit(f"llama.cpp: {error}") from error
        table, lines = table + rows, lines + more
    print_table(args, COLUMNS, table, ("torch",))
    for line in lines:
        print(line, file=sys.stderr if args.json else sys.stdout)


if __name__ == "__main__":
    main()
