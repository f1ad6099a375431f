"""`EngineCoreClient`: an engine as callers reach it, in this process or in others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from radixserve.engine.messages import Answer, Message
from radixserve.engine.output_collector import OutputCollector
from radixserve.output import EngineStatus


class EngineFacts(NamedTuple):
    """What does not change while an engine runs."""

    model_path: Path | None  # where its tokenizer is
    model: Any  # ModelInfo
    memory: Any  # MemoryPlan
    attention_backend: str
    resolved_config: Any
    capacity: int  # tokens that its cache holds


class EngineCoreClient(Protocol):
    """Carries out messages and requests. May be used from any thread."""

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked process, which does nothing."""
        ...

    def submit(self, collectors: Sequence[OutputCollector]) -> None:
        """Queue requests so that they arrive together. Returns at once; never raises."""
        ...

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests (all when None) with finish_reason "abort"; returns how many were open."""
        ...

    def abandon(self, collectors: Sequence[OutputCollector]) -> None:
        """End requests whose caller has left: returns at once, never raises."""
        ...

    def status(self) -> EngineStatus:
        """What it last said. Does not wait."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDead when it has ended."""
        ...

    def post(self, message: Message[Any]) -> bool:
        """Have `message` carried out soon; False when it has ended. Never raises."""
        ...

    def call(self, message: Message[Answer]) -> Answer:
        """Have `message` carried out between two steps and return its answer."""
        ...

    def ask(self, message: Message[Answer]) -> Future[Answer]:
        """Have `message` carried out between two steps; its answer comes in the future."""
        ...

    def close(self) -> None:
        """End everything that is open with EngineDead. Can be called again."""
        ...
