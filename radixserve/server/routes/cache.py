"""The cache over HTTP: /v1/cache/lookup, stats, advice, worth, tree, flush; closed sessions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.advice.worth import Prices
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.limits import Ration
from radixserve.server.gate.session_table import session_id_in
from radixserve.server.gate.state import caller_of, check_admin, namespace_of, server_of
from radixserve.server.gate.tenants import Caller
from radixserve.server.prompt.chat_prompt import ChatPrompt, read_chat
from radixserve.server.prompt.prompt_input import read_prompts
from radixserve.server.turn.request_hints import budget_of
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import FlushRequest, LookupRequest

router = APIRouter(route_class=JsonRoute)
_MAX_NODES = 10_000
_MAX_DEPTH = 64

_STORED_FIELDS = ("load_tokens", "load_s", "compute_s")  # of a lookup with a kv_store


@router.post("/v1/cache/lookup")
async def lookup(request: Request, body: LookupRequest) -> Response:
    """How much of a prompt is cached now, and why not more. Does not change the cache.

    With keys, the answer does not depend on what other tenants have cached.
    """
    server = server_of(request)
    server.check_model(body.model)
    namespace = namespace_of(request, body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", param="prompt")
    chat: ChatPrompt | None = None
    if body.prompt is None:
        chat = await read_chat(server, body, body.messages or (), namespace)
        prompts, is_list = [chat.token_ids], False
    else:
        limit = server.config.max_prompts
        prompts, is_list = await read_prompts(server.runtime, body.prompt, "prompt", limit)
    compares = not server.tenants

    def look_up_all() -> list[dict[str, Any]]:
        return [
            {
                "prompt_tokens": len(prompt),
                **server.runtime.lookup(prompt, namespace, compare_namespaces=compares)._asdict(),
            }
            for prompt in prompts
        ]

    lookups = await asyncio.to_thread(look_up_all)
    for lookup_fields in lookups:
        if chat is not None and lookup_fields["reason"] == "diverged":
            is_date = await asyncio.to_thread(chat.is_in_date, server, lookup_fields["position"])
            lookup_fields["reason"] = "date" if is_date else "diverged"
        lookup_fields["cached_tokens"] = lookup_fields.pop("cached_len")
        stored = lookup_fields.pop("stored")
        if stored is not None:
            lookup_fields["stored_tokens"] = stored.stored_len
            lookup_fields["host_tokens"] = stored.host_len
            lookup_fields |= {name: getattr(stored, name) for name in _STORED_FIELDS}
    return answer({"object": "list", "data": lookups} if is_list else lookups[0])


@router.get("/v1/cache/stats")
async def stats(request: Request) -> Response:
    """All counters for an admin; for a tenant, the sums of its own requests, and its hints."""
    server, caller = server_of(request), caller_of(request)
    if not caller.is_admin:
        by_hints = await asyncio.to_thread(server.runtime.held_by_hints, caller.tenant)
        usage = server.tenant_usage.of(caller.tenant)
        return answer({**usage, **by_hints, "hint_budget_tokens": budget_of(server)})
    counters: dict[str, Any] = {**await asyncio.to_thread(server.runtime.cache_stats)}
    for kind in ("retained", "pinned"):
        counters[f"{kind}_tokens"] = counters[f"pages_{kind}"] * counters["page_size"]
    counters["conversations"] = len(server.conversations)
    counters["server_sessions"] = len(server.sessions)
    return answer(counters)


@router.get("/v1/cache/advice")
async def advice(request: Request) -> Response:
    """What the traffic so far says about the cache: hit rate by size, and why tokens were computed;
    needs an admin key, since it is about the requests of all tenants."""
    check_admin(request)
    found = await asyncio.to_thread(server_of(request).runtime.advice)
    if found is None:
        raise ApiError(404, "this server does not follow its traffic: start it with advice")
    return answer({**found})


@router.get("/v1/cache/worth")
async def worth(request: Request) -> Response:
    """What caching has saved, in tokens, seconds and by the server's price list: of all tenants for
    an admin, else of the caller's own requests, without seconds, which depend on others' load."""
    server, caller = server_of(request), caller_of(request)
    tenant = None if caller.is_admin else caller.tenant
    document: Any = await asyncio.to_thread(server.runtime.cache_worth, tenant)
    if document is None:
        raise ApiError(404, "this server does not follow its traffic: start it with advice")
    prices = server.config.prices
    assert prices is None or isinstance(prices, Prices)
    if prices is not None:
        document["prices"] = prices._asdict()
    each = (document, *document["tenants"].values(), *document["sessions"], *document["last"])
    for one in each:
        if prices is not None:
            one["saved_money"] = prices.saved(one["cached_tokens"])
        if "session" in one:
            one["session"] = session_id_in(one["session"]) if one["session"] else None
        for name in () if caller.is_admin else ("saved_s", "ttft_s", "token_s", "parts"):
            one.pop(name, None)
    return answer(document)


@router.get("/v1/cache/tree")
async def tree(
    request: Request,
    max_nodes: int = 1_000,
    depth: int = 8,
    start: str = "",
    cache_salt: str | None = None,
    tenant: str | None = None,
) -> Response:
    """The caller's own part of the prefix tree, breadth first; for an admin, that of any tenant, or
    the whole tree.

    `start`: the path of a node as token ids, such as 1,4,77: the node whose edge contains the last
    of them. `depth`: levels below it. Nodes are shown with token ids, without texts.
    """
    server, caller = server_of(request), caller_of(request)
    _check_range("max_nodes", max_nodes, 0, _MAX_NODES)
    _check_range("depth", depth, 0, _MAX_DEPTH)
    path = _read_path(start)
    namespace = _namespace(caller, tenant, cache_salt)
    ration: Ration = request.app.state.snapshots.ration
    async with ration.turn():
        await ration.pause()
        began = time.perf_counter()
        dump: Any = await asyncio.to_thread(server.runtime.cache_tree, max_nodes, namespace)
        if not caller.is_admin:
            del dump["fragmentation"]  # of the pages of all tenants
        spaces: dict[str, Any] = {}
        for name, root in dump["namespaces"].items():
            node = _below(root, path)
            if node is not None:
                spaces[name] = _cut(node, depth)
        response = answer({**dump, "namespaces": spaces})
        ration.spend(time.perf_counter() - began)
    return response


@router.post("/v1/cache/flush")
async def flush(request: Request, body: FlushRequest) -> Response:
    """Drop the cached prefixes of one tenant or of all; needs an admin key. Requests in flight
    continue."""
    check_admin(request)
    server = server_of(request)
    namespace = None
    if body.tenant is not None or body.cache_salt is not None:
        owner = caller_of(request).tenant if body.tenant is None else body.tenant
        namespace = Caller(owner, is_admin=True).namespace(body.cache_salt)
    await asyncio.to_thread(server.runtime.flush_cache, namespace)
    server.conversations.forget(namespace)
    return answer({"flushed": "all" if namespace is None else namespace})


@router.post("/flush_cache")
@router.post("/reset_prefix_cache")
async def flush_all(request: Request) -> Response:
    """As /v1/cache/flush without fields: SGLang's and vLLM's route."""
    return await flush(request, FlushRequest())


def _namespace(caller: Caller, tenant: str | None, cache_salt: str | None) -> str | None:
    """The namespace to show; None: all. Raises ApiError 403 for one of another tenant."""
    if tenant is not None and not caller.is_admin and tenant != caller.tenant:
        raise ApiError(403, "the tree of another tenant needs an admin key", code="admin_only")
    if tenant is None and caller.is_admin:
        return None if cache_salt is None else caller.namespace(cache_salt)
    owner = Caller(caller.tenant if tenant is None else tenant, is_admin=False)
    return owner.namespace(cache_salt)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        message = f"{name} must be between {low} and {high}, got {value}"
        raise ApiError(400, message, param=name)


def _read_path(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        message = "start must be token ids with commas between them, such as 1,4,77"
        raise ApiError(400, message, param="start") from None


def _below(root: dict[str, Any], path: list[int]) -> dict[str, Any] | None:
    """The node whose edge holds the last token of `path`; None if the tree lacks it."""
    node = root
    while path:
        for child in node["children"]:
            tokens = child["tokens"][: len(path)]
            if tokens == path[: len(tokens)]:
                node, path = child, path[len(tokens) :]
                break
        else:
            return None
    return node


def _cut(node: dict[str, Any], depth: int) -> dict[str, Any]:
    """`node` with `depth` levels below it; the children of the last level only as a number."""
    shown = {**node, "children": []}
    if depth:
        shown["children"] = [_cut(child, depth - 1) for child in node["children"]]
    elif node["children"]:
        shown["num_children"] = len(node["children"])
    return shown


@router.delete("/v1/sessions/{session_id}")
async def delete_session(
    request: Request, session_id: str, cache_salt: str | None = None
) -> Response:
    """Close a session of the caller's."""
    server = server_of(request)
    namespace = caller_of(request).namespace(cache_salt)
    if not server.sessions.close(namespace, session_id):
        raise ApiError(404, "no such session is open", param="session_id")
    return answer({"id": session_id, "object": "session", "deleted": True})
