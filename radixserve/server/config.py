"""`ServerConfig`: the server's settings, from flags and a settings file.

Each field is a flag of `radixserve serve` and a name in its settings file; its help is its line in
the docstring.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from radixserve.advice.worth import Prices
from radixserve.checks import (
    StrictFields,
    check_choice,
    check_float,
    check_int,
    check_str,
    shown,
    suggestion,
)
from radixserve.config import EngineConfig, parse_bytes
from radixserve.errors import InvalidRequest
from radixserve.fleet.autoscaling import Autoscaling

LOOPBACK = ("localhost", "::1")
TOOL_CALL_PARSERS = (
    *("auto", "none", "generic", "hermes", "llama3", "mistral", "mistral-args", "granite", "kimi"),
    *("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "qwen3-coder", "minimax", "glm", "gemma4"),
    *("function-gemma", "lfm2", "olmo3", "nemotron", "hunyuan", "command-r", "command-r7b"),
    "harmony",
)
REASONING_PARSERS = ("auto", "think", "mistral", "gemma4", "command-r7b", "none")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(StrictFields):
    """The server's addresses, keys and limits.

    host                address to listen at; without keys only this machine's own
    port                port to listen at; 0 takes a free one and logs it
    served_model_name   name of the model in requests and answers, the first one in answers;
                        default: the model as given
    accept_any_model    take requests whatever model they name
    api_key_file        file of keys, one tenant a line; see docs/serving.md
    allow_unauthenticated_network_access  listen beyond this machine without keys: anyone who
                        reaches the port may use the model and reads and flushes the one cache
    allowed_host        another name by which a server without keys is reached, beside localhost and
                        host; requests for other names are answered 403
    allowed_media_domains  hosts from whose http and https URLs pictures of prompts are fetched;
                        none by default. Redirects must lead to them, too, and their addresses must
                        be of the internet
    media_fetch_timeout  seconds for a picture, its redirects included
    cors_origin         origin of web pages that may use the server, such as https://chat.example;
                        * is any; other pages get 403 without keys
    max_connections     most open connections; more are answered 503
    max_connections_per_address  most open connections from one address
    write_timeout       seconds in which a client must read 64 KiB of an answer that waits for it,
                        or all of it; otherwise its request is aborted and its connection closed
    ping_interval       seconds without data after which a stream sends a ping: a comment, or an
                        event of its protocol; 0: never
    max_queued_requests  most requests that wait for the engine; every sample of a prompt counts.
                        More are answered 429. When the queue is half full, no tenant gets more
                        than its share
    max_queued_tokens   most prompt tokens that wait for the engine; more are answered 429
    max_body            most bytes of a request's body, "32MB" works
    max_prompts         most prompts of a request
    max_n               largest n and best_of
    max_logprobs        largest logprobs, top_logprobs and prompt_logprobs; -1: the vocabulary. A
                        request asks for the vocabulary with -1, too
    return_tokens_as_token_ids  write the tokens of log-probabilities as token_id:5; requests may
                        override it
    enable_force_include_usage  usage in every event of every stream
    enable_per_request_metrics  the times of a request in its answer, as the member metrics
    shutdown_timeout    seconds that requests in flight have after SIGTERM
    ready_timeout       seconds without a step, with work to do, until /health/ready fails
    max_conversations   most conversations of a tenant whose exact token ids are remembered, and
                        most sessions and branches that it may have open; 0: none
    max_responses       most stored responses of a tenant, which previous_response_id may name; 0:
                        none
    max_response_bytes  most bytes of a tenant's stored responses, "64MB" works
    session_lease       seconds that a session_id stays open after its last request
    hint_budget_tokens  most tokens that the pins and retains of one tenant may keep; default: a
                        quarter of the pool
    strict_fields       refuse what has no effect here, by its name: fields that cannot change an
                        answer, and tools other than functions. By default, they are skipped and
                        named in a header of the answer
    keep_billing_header  keep the billing header of coding agents in their system prompts; it
                        changes with every request, so that nothing after it is found in the cache
    tool_call_parser    style in which the model writes tool calls: hermes, llama3, mistral,
                        mistral-args, granite, kimi, deepseek-v3, deepseek-v3.1, deepseek-v3.2,
                        qwen3-coder, minimax, glm, gemma4, function-gemma, lfm2, olmo3, nemotron,
                        hunyuan, command-r, command-r7b, harmony or generic, see docs/tools.md;
                        none: calls stay text; auto: by its chat template
    reasoning_parser    which text becomes reasoning_content. think: the text in <think></think>;
                        mistral: in [THINK][/THINK]; gemma4: in the channel "thought"; command-r7b:
                        between <|START_THINKING|> and <|END_THINKING|>; none: no text; auto: by the
                        chat template
    replicas            number of engines, each in a process and with a cache of its own; 0: one in
                        this process. A request runs where it costs least, by cached tokens and
                        load. Needs the extra [cluster]
    autoscaling         add and remove replicas by load: fields of Ray Serve's autoscaling_config,
                        such as "max_replicas=4,target_ongoing_requests=32"; `replicas` is then
                        their number at the beginning, by default min_replicas
    ray_address         address of a running Ray cluster for the replicas, "auto" for the one that
                        Ray finds; default: they are started on this machine
    prices              price list of prompt tokens, per million, by which /v1/cache/worth says what
                        caching saved: "input=3,cached_input=0.3,currency=EUR"
    log_requests        write a line of JSON per request to standard error, but not for requests of
                        health and metrics that succeed
    log_probes          with log_requests, also write lines for health and metrics
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | Iterable[str] | None = None
    accept_any_model: bool = False
    api_key_file: str | None = None
    allow_unauthenticated_network_access: bool = False
    allowed_host: str | Iterable[str] = ()
    allowed_media_domains: str | Iterable[str] = ()
    media_fetch_timeout: float = 5.0
    cors_origin: str | Iterable[str] = ()
    max_connections: int = 4096
    max_connections_per_address: int = 2048
    write_timeout: float = 60.0
    ping_interval: float = 10.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    max_body: int | str = "32MB"
    max_prompts: int = 1024
    max_n: int = 128
    max_logprobs: int = 100
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    shutdown_timeout: float = 30.0
    ready_timeout: float = 60.0
    max_conversations: int = 4096
    max_responses: int = 1024
    max_response_bytes: int | str = "64MB"
    session_lease: float = 300.0
    hint_budget_tokens: int | None = None
    strict_fields: bool = False
    keep_billing_header: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    replicas: int = 0
    autoscaling: str | Autoscaling | None = None
    ray_address: str | None = None
    prices: str | Prices | None = None
    log_requests: bool = False
    log_probes: bool = False

    def __post_init__(self) -> None:
        self._check_ints(
            port=(0, 65535),
            max_connections=(1, None),
            max_connections_per_address=(1, None),
            max_queued_requests=(1, None),
            max_queued_tokens=(1, None),
            max_prompts=(1, None),
            max_n=(1, 1024),
            max_logprobs=(-1, None),
            max_conversations=(0, None),
            hint_budget_tokens=(0, None),
            max_responses=(0, None),
            replicas=(0, 4096),
        )
        self._check_bools(
            "allow_unauthenticated_network_access",
            "accept_any_model",
            "strict_fields",
            "keep_billing_header",
            "return_tokens_as_token_ids",
            "enable_force_include_usage",
            "enable_per_request_metrics",
            "log_requests",
            "log_probes",
        )
        if self.prices is not None and not isinstance(self.prices, Prices):
            object.__setattr__(self, "prices", Prices.read("prices", self.prices))
        if self.autoscaling is not None:
            rule = Autoscaling.read("autoscaling", self.autoscaling)
            object.__setattr__(self, "autoscaling", rule)
            if self.replicas:
                check_int("replicas", self.replicas, rule.min_replicas, rule.max_replicas)
            object.__setattr__(self, "replicas", self.replicas or rule.min_replicas)
        check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        for name in ("ping_interval", "shutdown_timeout", "ready_timeout", "session_lease"):
            check_float(name, getattr(self, name), 0.0, 1e6)
        for name in ("write_timeout", "media_fetch_timeout"):
            check_float(name, getattr(self, name), 0.001, 1e6)
        if self.served_model_name is not None:
            names = _read_names("served_model_name", self.served_model_name)
            object.__setattr__(self, "served_model_name", names or None)
        for name in ("host", "api_key_file", "ray_address"):
            value = getattr(self, name)
            if value is not None and not check_str(name, value):
                raise InvalidRequest(f"{name} must not be empty")
        for name in ("allowed_host", "allowed_media_domains", "cors_origin"):
            object.__setattr__(self, name, _read_names(name, getattr(self, name)))
        for name in ("max_body", "max_response_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        is_open = self.allow_unauthenticated_network_access or self.api_key_file is not None
        if not is_open and not is_loopback(self.host):
            raise InvalidRequest(
                f"host {self.host!r} is reachable from other machines: give --api-key-file, or "
                "--allow-unauthenticated-network-access if all of them may use the model"
            )


def _read_names(name: str, value: object) -> tuple[str, ...]:
    """One text or several as a tuple. Raises InvalidRequest, which names the setting `name`."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise InvalidRequest(f"{name} must be text or a list of texts, got {shown(value)}")
    names = tuple(names)
    if not all(isinstance(text, str) and text for text in names):
        raise InvalidRequest(f"{name} must be text or a list of texts, got {shown(value)}")
    return names


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    return host in LOOPBACK or host.startswith("127.")


def read_settings(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a TOML file of settings. Returns the fields of ServerConfig and those of EngineConfig.

    Names may have dashes instead of underscores. Raises InvalidRequest for an unknown name or a
    file that is not TOML, OSError for a file that cannot be read.
    """
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from None
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    ours, theirs = ({f.name for f in fields(kind)} for kind in (ServerConfig, EngineConfig))
    unknown = sorted(set(given) - ours - theirs)
    if unknown:
        allowed = ", ".join(sorted(ours | theirs))
        hint = suggestion(unknown[0], ours | theirs)
        listed = ", ".join(unknown)
        raise InvalidRequest(f"{path}: unknown setting {listed}{hint}; allowed: {allowed}")
    return (
        {name: value for name, value in given.items() if name in ours},
        {name: value for name, value in given.items() if name in theirs},
    )
