"""`EngineClient`: what Runtime, branches and chats share on their way to the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from radixserve.api.loop_waker import LoopWakers
from radixserve.api.request_builder import RequestBuilder
from radixserve.api.request_handle import RequestHandle
from radixserve.arrays import IntArray
from radixserve.cache import Lookup
from radixserve.engine.core_client import EngineCoreClient
from radixserve.engine.messages import LookUpPrompt
from radixserve.errors import InvalidRequest
from radixserve.output import Chunk
from radixserve.request import Request
from radixserve.text.prompts import PromptReader
from radixserve.text.tokenizer import Tokenizer


class EngineClient:
    """Builds requests and submits them to the engine's thread. May be used from any thread."""

    def __init__(self, core: EngineCoreClient, builder: RequestBuilder, wakers: LoopWakers) -> None:
        """`wakers`: those that `core` holds while it prepares a step."""
        self.core = core
        self.builder = builder
        self.wakers = wakers
        self.session_numbers = itertools.count()  # for the names of branches' sessions

    @property
    def reader(self) -> PromptReader:
        return self.builder.reader

    @property
    def tokenizer(self) -> Tokenizer:
        """InvalidRequest where the model has none."""
        if self.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: it knows token ids, but no text")
        return self.reader.tokenizer

    def submit(
        self,
        requests: Sequence[Request],
        finish: Callable[[list[Any]], Any] | None = None,
        owners: Sequence[int] | None = None,
        *,
        streams: bool = False,
    ) -> RequestHandle[Any]:
        """To be entered, or asked by `get` or `aget`: then the requests arrive together.

        `finish`: makes the result of `get` from all outputs, in the requests' order. `owners`: the
        index of each request's prompt, for errors. `streams`: the handle yields Chunks.
        """
        return RequestHandle(
            self.core,
            self.reader.tokenizer,
            requests,
            streams=streams,
            finish=finish,
            owners=owners,
            wakers=self.wakers,
        )

    def stream(self, request: Request) -> RequestHandle[Chunk]:
        """To be entered and iterated over."""
        return self.submit([request], streams=True)

    def lookup(
        self, token_ids: IntArray, namespace: str, *, compare_namespaces: bool = True
    ) -> Lookup:
        """How much of a prompt is cached now, and why not more."""
        return self.core.call(LookUpPrompt(token_ids, namespace, compare_namespaces))
