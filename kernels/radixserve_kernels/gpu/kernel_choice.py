"""Which kernels are fastest on which card: a table by device name, and rules for other cards.

The table, kernel_choice.json, is what `benchmarks/gpu/run.py --parts choose` measures. A card that
is not in it gets the fields' defaults, which leave the choice to the callers' rules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What was fastest on a card."""

    decode: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # "tensor" or "cuda" cores for FlashInfer's decode, by query heads of a K/V head and by rows
    fa3: bool = False  # whether FlashInfer's fa3 beats its fa2 with long queries
    extend_tile: tuple[int, int, int, int] | None = None  # Triton, long queries: queries, keys,
    # warps, stages

    def tensor_cores(self, group: int, num_rows: int) -> bool | None:
        """For `num_rows` rows as for the next larger number that was measured; None: none was."""
        measured = {int(rows): cores for rows, cores in self.decode.get(str(group), {}).items()}
        if not measured:
            return None
        nearest = min((rows for rows in measured if rows >= num_rows), default=max(measured))
        return measured[nearest] == "tensor"


def choice_of(device: torch.device) -> KernelChoice:
    """For a CUDA device by its name; elsewhere the defaults."""
    return _of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else KernelChoice()


@functools.cache
def _of_name(name: str) -> KernelChoice:
    return read_table().get(name, KernelChoice())


def read_table(path: Path = TABLE) -> dict[str, KernelChoice]:
    """By device name."""
    table = json.loads(path.read_text())
    for entry in table.values():
        if entry.get("extend_tile"):
            entry["extend_tile"] = tuple(entry["extend_tile"])
    return {name: KernelChoice(**entry) for name, entry in table.items()}
