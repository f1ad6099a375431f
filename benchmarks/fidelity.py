"""How far weights of 8 and 4 bits and activations in 8 or 16 move a model's distributions.

    python benchmarks/fidelity.py [--model smollm2] [--num-tokens 20000] [--text FILE]
        [--activation-bits 16]

Text is cut into windows. As in llama.cpp's llama-perplexity the first half of each is context only;
every distribution after it is compared with that of the same weights widened to float32: mean and
99th percentile of the KL divergence in nats, the share of tokens whose most likely successor is the
same, and the perplexities. By default text is that of modules of Python's standard library. Needs
no network; the model is read once for each form. kv_fidelity.py does the same for K and V.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness.arguments import parse
from harness.cpu_model import CpuModel
from harness.report import print_table
from torch import Tensor

from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.source import ModelSource, find_model
from radixserve.text.tokenizer import Tokenizer

COLUMNS = ("", "KL mean", "KL at 99 %", "same best token %", "perplexity")
REFERENCE = "widened to float32"
FORMS = (  # name, dtype of activations, K and V, weight_dtype
    ("as stored, activations float32", torch.float32, "auto"),
    ("as stored, activations bfloat16", torch.bfloat16, "auto"),
    ("int8, activations float32", torch.float32, "int8"),
    ("int8, activations bfloat16", torch.bfloat16, "int8"),
    ("widened to bfloat16", torch.bfloat16, None),
)


def main() -> None:
    args = parse(
        __doc__,
        model="smollm2",
        num_tokens=20_000,
        window=512,
        text=Path,
        activation_bits=16,
        json=False,
    )
    source = find_model(args.model)
    windows = list(read_windows(source, args.text, args.num_tokens, args.window))
    reference = load_cpu_decoder(source, torch.float32, None)
    bits = args.activation_bits
    models = {name: load_cpu_decoder(source, *form, bits) for name, *form in FORMS}
    tallies = {form: Tally() for form in (REFERENCE, *models)}
    for number, tokens in enumerate(windows):
        half = tokens[len(tokens) // 2 :]
        expected = all_logprobs(reference, tokens)[-len(half) :]
        tallies[REFERENCE].add(expected, expected, half)
        for form, model in models.items():
            tallies[form].add(expected, all_logprobs(model, tokens)[-len(half) :], half)
        print(f"window {number + 1} of {len(windows)}", file=sys.stderr, flush=True)
    print_table(args, COLUMNS, [[name, *tally.cells()] for name, tally in tallies.items()])


class Tally:
    """Divergences of one form's distributions, and its perplexity."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []
        self._same: list[Tensor] = []
        self._surprise, self._count = 0.0, 0

    def add(self, p: Tensor, q: Tensor, tokens: list[int]) -> None:
        """p: the reference's log-probabilities [n, V] after every token; q: the form's."""
        self._divergences.append((p.exp() * (p - q)).sum(-1))
        self._same.append(p.argmax(-1) == q.argmax(-1))
        after = torch.tensor(tokens[1:])[:, None]
        self._surprise -= float(q[:-1].gather(1, after).sum())
        self._count += len(after)

    @property
    def mean_kl(self) -> float:
        return float(torch.cat(self._divergences).mean())

    @property
    def agreement(self) -> float:
        """The share of tokens with the same most likely successor."""
        return float(torch.cat(self._same).float().mean())

    def cells(self) -> list[str]:
        """The figures of COLUMNS."""
        worst = torch.cat(self._divergences).quantile(0.99)
        perplexity = math.exp(self._surprise / self._count)
        figures = f"{self.mean_kl:.5f} {worst:.4f} {100 * self.agreement:.2f} {perplexity:.3f}"
        return figures.split()


def all_logprobs(model: CpuDecoder, tokens: list[int]) -> Tensor:
    """[n, V] after every token."""
    rows = CpuModel(model, 1, len(tokens))
    logits = rows.forward(range(1), np.array(tokens, np.int32), 0, len(tokens))
    return logits.log_softmax(-1)


def read_windows(
    source: ModelSource, path: Path | None, num_tokens: int, window: int
) -> Iterator[list[int]]:
    assert source.path is not None, "random weights have no text"
    tokenizer = Tokenizer.load(source.path)
    assert tokenizer is not None, "the model has no tokenizer"
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "asyncio/tasks.py", "collections/__init__.py", "datetime.py", "enum.py")
    paths = [path] if path else [library / name for name in names]
    tokens: list[int] = []
    for path in paths:
        tokens += tokenizer.encode(path.read_text(encoding="utf-8"))[: num_tokens - len(tokens)]
    for first in range(0, len(tokens) - window + 1, window):
        yield tokens[first : first + window]


if __name__ == "__main__":
    main()
