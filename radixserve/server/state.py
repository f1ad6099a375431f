"""`Server`: what the routes share."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from radixserve.api.runtime import Runtime
from radixserve.server.config import ServerConfig
from radixserve.server.conversations import Conversations
from radixserve.server.counters import ServerCounters
from radixserve.server.errors import ApiError
from radixserve.server.limits import Limits
from radixserve.server.parser_configs import OutputParserConfigs
from radixserve.server.responses.store import ResponseStore
from radixserve.server.session_table import InFlight, SessionTable
from radixserve.server.tenant_usage import TenantUsage
from radixserve.server.tenants import Caller, Tenants
from radixserve.server.token_texts import TokenTexts


class Server:
    """One model, its callers, and what is in flight. Owned by the event loop."""

    def __init__(self, config: ServerConfig, model: str, tenants: Tenants) -> None:
        self.config = config
        self.model_name = config.served_model_name or model
        self.tenants = tenants
        self.limits = Limits(config)
        self.started_at = int(time.time())
        self.is_draining = False
        self.in_flight: set[InFlight] = set()
        self.conversations = Conversations(config.max_conversations)
        assert isinstance(config.max_response_bytes, int)
        self.responses = ResponseStore(config.max_responses, config.max_response_bytes)
        self.tenant_usage = TenantUsage()
        self.counters = ServerCounters()
        self.num_billing_headers = 0  # taken out of system prompts
        self._sessions: SessionTable | None = None
        self._runtime: Runtime | None = None
        self._token_texts: TokenTexts | None = None
        self._parser_configs: OutputParserConfigs | None = None

    def set_runtime(self, runtime: Runtime) -> None:
        """The model is loaded."""
        self._runtime = runtime
        self._sessions = SessionTable(
            self.config.session_lease, self.config.max_conversations, runtime.close_session
        )
        self._token_texts = TokenTexts(runtime.tokenizer)
        self._parser_configs = OutputParserConfigs(
            runtime.tokenizer, self.config.tool_call_parser, self.config.reasoning_parser
        )

    @property
    def is_loaded(self) -> bool:
        return self._runtime is not None

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "the gate lets nothing pass before the model is loaded"
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

    def check_open(self) -> None:
        """Raise ApiError 503 while the model is being loaded, and from SIGTERM on."""
        if self.is_draining:
            headers = {"connection": "close", "retry-after": "5"}
            raise ApiError(503, "the server is shutting down", code="shutdown", headers=headers)
        if self._runtime is None:
            headers = {"retry-after": "5"}
            raise ApiError(503, "the model is being loaded", code="loading", headers=headers)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 where a request names another model."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["radixserve.caller"]
    return caller


def check_admin(request: Request) -> None:
    """Raise ApiError 403 where keys are set and this one is no admin's."""
    if not caller_of(request).is_admin:
        raise ApiError(403, "this route needs an admin key", code="admin_only")


def request_id_of(request: Request) -> str:
    name: Any = request.scope["radixserve.request_id"]
    return str(name)
