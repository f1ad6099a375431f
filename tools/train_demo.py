"""Train the demo model that ``Runtime("demo")`` serves without a download.

One command does everything: it reads the documentation that every Python installation carries
(the language topics of ``pydoc`` and the docstrings of the standard library, PSF licence), turns
it into plain documents and synthetic chats, trains a byte-level BPE tokenizer and a small Llama
on them with the CPU, and writes the folder that ships with the package::

    python tools/train_demo.py --out radixserve/models/demo --minutes 50

The result is a toy: it writes documentation-like English about the standard library. It is made to
exercise the engine (chat template, prefix cache, long prompts); its answers are often wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from demo_model.training import Trainer


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model of radixserve.")
    default = Path(__file__).resolve().parent.parent / "radixserve" / "models" / "demo"
    parser.add_argument("--out", type=Path, default=default, help="folder to write")
    parser.add_argument("--steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--save-minutes", type=float, default=10, help="time between two saves")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and weights")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary")
    parser.add_argument("--init", type=Path, help="folder of an earlier run to go on from")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    options = parser.parse_args(arguments)
    if not options.steps and not options.minutes:
        options.minutes = 50.0
    return options


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    options = parse_options()
    torch.set_num_threads(options.threads)
    Trainer(options).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
