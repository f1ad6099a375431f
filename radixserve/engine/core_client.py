"""`EngineCoreClient`: the interface of callers to an engine, in this process or in others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from radixserve.engine.messages import Answer, EngineMessage
from radixserve.engine.output_collector import OutputCollector
from radixserve.reports import EngineStatus

if TYPE_CHECKING:
    from radixserve.models.base import ModelInfo
    from radixserve.runner.base import MemoryPlan, ResolvedConfig


class EngineFacts(NamedTuple):
    """Properties of an engine that do not change while it runs."""

    model_path: Path | None  # where its tokenizer is
    model: ModelInfo
    memory: MemoryPlan
    attention_backend: str
    resolved_config: ResolvedConfig
    capacity: int  # tokens that fit into its cache


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
        """End requests that no caller waits for: returns at once, never raises."""
        ...

    def status(self) -> EngineStatus:
        """Returns its load and statistics. Does not wait for the engine."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDead when it has ended."""
        ...

    def post(self, message: EngineMessage[Any]) -> bool:
        """Send `message`, to be carried out between two steps. Returns False if the engine has
        ended. Never raises."""
        ...

    def call(self, message: EngineMessage[Answer]) -> Answer:
        """Send `message`, wait until it is carried out between two steps, and return its answer.
        Raises EngineDead, and what the engine raises."""
        ...

    def ask(self, message: EngineMessage[Answer]) -> Future[Answer]:
        """Send `message`, to be carried out between two steps. The future gets its answer."""
        ...

    def close(self) -> None:
        """End all open requests and calls with EngineDead. Can be called again."""
        ...
