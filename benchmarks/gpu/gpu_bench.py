"""What a part is handed: the settings of the run, and where its rows go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_clock import Clock
from gpu_jobs import Skip
from gpu_limits import Ceilings, Shape
from gpu_report import Cell, Check, Row
from gpu_settings import Settings

from radixserve.attention.choice import choose_backend, unsupported_reason
from radixserve.models.sizes import SIZES

LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"
TINY = {  # as many heads for a K/V head as the large models, and heads as large
    **SIZES["tiny-llama"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2_048,
}
SIZES.setdefault("bench-tiny", TINY)
SMALLER = {LLAMA: "tiny-llama", QWEN: "tiny-qwen3", "bench-tiny": "tiny-llama"}  # in a dry run
DTYPE = torch.bfloat16
SPARE_BYTES = 6 << 30  # of an engine, besides matrices and pool


class Bench:
    """One job of a part: its settings, and where its results go."""

    def __init__(self, settings: Settings, tell: Callable[[str, Any], None]) -> None:
        """`tell(kind, value)`: kinds are "row", "note" and "facts"."""
        self.settings, self._tell = settings, tell
        self.is_dry, self.is_quick = settings.is_dry, settings.is_quick
        if not self.is_dry and not torch.cuda.is_available():
            raise Skip("PyTorch finds no CUDA device; --dry-run walks through on the CPU")
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", 0)
        self.clock = Clock(self.device)
        if settings.backend != "auto" and (reason := self.unsupported_reason(settings.backend)):
            raise Skip(f"no {settings.backend}: {reason}")
        torch.manual_seed(settings.seed)
        if self.is_dry:
            torch.set_num_threads(1)

    @property
    def ceilings(self) -> Ceilings:
        assert self.settings.ceilings is not None, "the limits come first"
        return self.settings.ceilings

    def pick(self, full: Any, quick: Any, dry: Any) -> Any:
        """What belongs to the size of this run."""
        return dry if self.is_dry else quick if self.is_quick else full

    def model(self, name: str) -> str:
        """The path of that size with random weights; in a dry run of a tiny one like it."""
        return f"random:{SMALLER[name] if self.is_dry else name}"

    def shape(self, name: str) -> Shape:
        return Shape.of(SIZES[SMALLER[name] if self.is_dry else name])

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Of EngineConfig, for every engine of the run."""
        return {
            "device": str(self.device),
            "dtype": "bfloat16",
            "attention_backend": self.settings.backend,
            "page_size": self.settings.page_size,
            "seed": self.settings.seed,
        }

    def backend_name(self, head_dim: int = 128) -> str:
        """What the run's backend comes to."""
        if self.is_dry and self.settings.backend == "auto":
            return "triton"
        return choose_backend(self.settings.backend, DTYPE, self.device, head_dim)

    def unsupported_reason(
        self, backend: str, dtype: torch.dtype = DTYPE, head_dim: int = 128
    ) -> str:
        """Why a backend cannot be had here; "" if it can."""
        return unsupported_reason(backend, dtype, self.device, head_dim)

    def check_engine(self, model: str, num_pages: int, count: int = 1) -> None:
        """Raise Skip where `count` engines of a model and pools of their own have no room."""
        if self.device.type != "cuda":
            return
        shape = self.shape(model)
        pool = num_pages * self.settings.page_size * shape.kv_bytes
        wanted = count * (shape.weight_bytes * 5 // 4 + pool + SPARE_BYTES)
        free, total = torch.cuda.mem_get_info(self.device)
        if wanted > free:
            wants, has, all_of_it = (f"{size / 2**30:.0f} GiB" for size in (wanted, free, total))
            raise Skip(f"needs {wants}, {has} of {all_of_it} are free")

    def row(
        self,
        name: str,
        cells: dict[str, Cell] | None = None,
        *,
        checks: tuple[Check, ...] = (),
        section: str = "",
        failed: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        """A line of the part's table."""
        row = Row(name, cells or {}, checks, section, failed, "", details or {})
        self._tell("row", row)

    def skip(self, name: str, why: str, section: str = "") -> None:
        """A line of the table that cannot be had here."""
        self._tell("row", Row(name, section=section, skipped=why))

    def note(self, text: str) -> None:
        """Below the table."""
        self._tell("note", text)

    def give_facts(self, facts: dict[str, Any]) -> None:
        self._tell("facts", facts)

    def at_least(self, what: str, value: float, limit: float) -> Check:
        return Check(what, value, limit, is_judged=not self.is_dry)

    def at_most(self, what: str, value: float, limit: float) -> Check:
        return Check(what, value, limit, at_most=True, is_judged=not self.is_dry)
