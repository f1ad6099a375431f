"""`AppState`: the state that all routes share, such as configuration, runtime and tenants."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from radixserve.api.runtime import Runtime
from radixserve.cache.namespace import as_namespace
from radixserve.checks import shown
from radixserve.epochs.messages import KVAfterUpdate
from radixserve.errors import InvalidRequest
from radixserve.images.reader import PictureReader
from radixserve.images.sources import FetchUrl
from radixserve.reports import EngineStatus
from radixserve.server.answer.parser_configs import OutputParserConfigs
from radixserve.server.config import ServerConfig
from radixserve.server.gate.background_responses import BackgroundResponses
from radixserve.server.gate.branch_table import BranchTable
from radixserve.server.gate.counters import ServerCounters
from radixserve.server.gate.json_body import FreedMemory, JsonParser
from radixserve.server.gate.limits import GrammarThreads, Limits
from radixserve.server.gate.prompt_records import PromptRecords
from radixserve.server.gate.response_store import ResponseStore
from radixserve.server.gate.session_table import InFlight, SessionTable
from radixserve.server.gate.tenants import Caller, TenantConversations, Tenants, TenantUsage
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.logprobs import TokenTexts
from radixserve.text.chat_clocks import ChatClocks

_SHARE_ALONE = 0.75  # of the slots, for one request while no other tenant is active


class AppState:
    """One model, its callers, and the requests in flight. Owned by the event loop."""

    def __init__(self, config: ServerConfig, model: str, tenants: Tenants) -> None:
        self.config = config
        self.model_path = model
        self.model_names = tuple(config.served_model_name or (model,))
        self.tenants = tenants
        self.limits = Limits(config)
        self.json_parser = JsonParser()
        self.freed_memory = FreedMemory()
        self.grammar_threads = GrammarThreads()
        self.started_at = int(time.time())
        self.is_draining = False
        self.kv_after_update: KVAfterUpdate = "recompute"  # unless an update says otherwise
        self.admitted: set[str] = set()  # ids of HTTP requests that are being read or answered
        self.in_flight: set[InFlight] = set()  # the computed part of these, and of the background
        self.conversations = TenantConversations(config.max_conversations)
        self.chat_clocks = ChatClocks(config.max_conversations)
        assert isinstance(config.max_response_bytes, int)
        self.responses = ResponseStore(config.max_responses, config.max_response_bytes)
        self.prompt_records = PromptRecords(config.max_conversations)
        self.tenant_usage = TenantUsage()
        self.counters = ServerCounters()
        self.background = BackgroundResponses(self.responses, self.counters)
        self.logged_fields: set[tuple[str, str]] = set()  # (path, name) of logged skipped fields
        self.num_billing_headers = 0  # taken out of system prompts
        self.branches = BranchTable(config.session_lease, config.max_conversations)
        self.trace_of: Callable[[Scope], AbstractContextManager[Any]] = nullcontext
        self.pictures: PictureReader | None = None  # reads those of callers
        self._sessions: SessionTable | None = None
        self._runtime: Runtime | None = None
        self._token_texts: TokenTexts | None = None
        self._parser_configs: OutputParserConfigs | None = None

    def set_runtime(self, runtime: Runtime) -> None:
        """Called once, when the model has been loaded."""
        self._runtime = runtime
        if runtime.pictures is not None:
            self.pictures = runtime.pictures.of_callers(_url_fetcher(self.config))
            runtime.pictures.has_tenants = bool(self.tenants)
        self._sessions = SessionTable(
            self.config.session_lease, self.config.max_conversations, runtime.close_session
        )
        if runtime.config.otlp_traces_endpoint is not None:
            from radixserve.spans.context import trace_of

            self.trace_of = trace_of
        self._token_texts = TokenTexts(runtime.tokenizer)
        self._parser_configs = OutputParserConfigs(
            runtime.tokenizer, self.config.tool_call_parser, self.config.reasoning_parser
        )

    @property
    def is_loaded(self) -> bool:
        return self._runtime is not None

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "the middleware refuses requests until it is loaded"
        return self._runtime

    @property
    def sessions(self) -> SessionTable:
        assert self._sessions is not None
        return self._sessions

    @property
    def token_texts(self) -> TokenTexts:
        assert self._token_texts is not None
        return self._token_texts

    @property
    def parser_configs(self) -> OutputParserConfigs:
        assert self._parser_configs is not None
        return self._parser_configs

    def num_waiting(self, tenant: str) -> int:
        """The tenant's engine requests that have not generated a token. O(requests in flight)."""
        return sum(
            request.num_requests
            for request in self.in_flight
            if request.tenant == tenant and not request.has_generated
        )

    def engine_status(self) -> EngineStatus:
        """The engine's status, in which requests that have not been submitted yet (see
        `num_at_once`) count as waiting. O(requests in flight and unsubmitted) with tenants, else
        O(1)."""
        status = self.runtime.status()
        if not self.tenants:
            return status
        unsubmitted = [
            engine_request
            for http_request in self.in_flight
            for engine_request in http_request.unsubmitted
        ]
        num_tokens = sum(len(engine_request.token_ids) for engine_request in unsubmitted)
        return status._replace(
            waiting=status.waiting + len(unsubmitted),
            waiting_tokens=status.waiting_tokens + num_tokens,
        )

    def num_at_once(self, tenant: str) -> int | None:
        """How many engine requests of one HTTP request are submitted at a time; None: all.

        While other tenants are active, it is the tenant's share of the slots: each row of a step
        delays the next token of all requests. Otherwise it is `_SHARE_ALONE` of the slots; the
        rest stays free for tenants that arrive later.
        """
        if not self.tenants:
            return None
        slots = self.runtime.config.max_running_requests * max(1, self.config.replicas)
        is_alone = all(request.tenant == tenant for request in self.in_flight)
        share = _SHARE_ALONE if is_alone else min(_SHARE_ALONE, self.tenants.share(tenant))
        return max(1, int(slots * share))

    def check_open(self) -> None:
        """Raise ApiError 503 while the model is being loaded, and after SIGTERM."""
        if self.is_draining:
            headers = {"connection": "close", "retry-after": "5"}
            raise ApiError(503, "the server is shutting down", code="shutdown", headers=headers)
        if self._runtime is None:
            headers = {"retry-after": "5"}
            raise ApiError(503, "the model is being loaded", code="loading", headers=headers)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if a request names a model that is not served. None: no name."""
        if self.config.accept_any_model or name is None or name in self.model_names:
            return
        if name in self.runtime.adapters:
            return
        served = ", ".join(map(repr, (*self.model_names, *self.runtime.adapters)))
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here; {served} is",
            param="model",
            code="model_not_found",
        )

    def check_room(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Raise ApiError 429 if the queue does not have room for a tenant's requests, of so many
        tokens in all."""
        share = self.tenants.share(tenant)
        own_waiting = self.num_waiting(tenant) if share < 1.0 else 0  # else not looked at
        self.limits.check(
            self.engine_status(), num_requests, num_tokens, share=share, own_waiting=own_waiting
        )

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.model_names[0]

    def name_of(self, namespace: str) -> str:
        """The name in answers of what computes requests in a namespace: the model or an adapter."""
        return as_namespace(namespace).adapter.rpartition("@")[0] or self.model_name


def _url_fetcher(config: ServerConfig) -> FetchUrl | None:
    """Fetches pictures from the allowed hosts; None where none is. Raises InvalidRequest."""
    if not config.allowed_media_domains:
        return None
    try:
        from radixserve.images.fetching import UrlFetcher
    except ImportError as error:
        raise InvalidRequest(
            f'allowed_media_domains needs more packages ({error}): pip install "radixserve[images]"'
        ) from None
    return UrlFetcher(config.allowed_media_domains, config.media_fetch_timeout)


def server_of(request: Request) -> AppState:
    server: AppState = request.app.state.server
    return server


def namespace_of(request: Request, body: Any) -> str:
    """The cache namespace of a request: its caller's, with the adapter that its model names."""
    server, model = server_of(request), getattr(body, "model", None)
    namespace = caller_of(request).namespace(body.cache_salt)
    if model is None or model in server.model_names or model not in server.runtime.adapters:
        return namespace
    return server.runtime.client.namespace(namespace, model)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["radixserve.caller"]
    return caller


def model_path_for(request: Request) -> str:
    """The model's path or hub id; its name in answers for callers that are not admins."""
    server = server_of(request)
    return server.model_path if caller_of(request).is_admin else server.model_name


def check_admin(request: Request) -> None:
    """Raise ApiError 403 unless the caller is an admin. Without keys, every caller is one."""
    if not caller_of(request).is_admin:
        raise ApiError(403, "this route needs an admin key", code="admin_only")


def request_id_of(request: Request) -> str:
    name: Any = request.scope["radixserve.request_id"]
    return str(name)
