"""Requests as they run and wait, for a snapshot. Loaded when one is taken."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from radixserve.cache.snapshot import SnapshotView, page_runs
from radixserve.scheduler.request_state import RequestState


def snapshot_requests(
    requests: Mapping[str, RequestState], view: SnapshotView, now: float
) -> dict[str, Any]:
    """Requests as they run and wait, read only. O(requests).

    {"running", "waiting": how many, "requests": running ones first, up to view.max_requests}.
    Each request has {"id", "namespace", "session", "priority", "state", "waits_for", "awaited_len",
    "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "age_s", "miss",
    "pages", "num_pages", "num_shared"}:

    state          "prefill", "decode", "queued", "preempted" or "follows": another request,
                   "waits_for", computes tokens that it needs, up to "awaited_len"
    cached_tokens  of a queued request, what it would find cached now
    pages          its page table as runs of consecutive ids, [[first, count], ...]; the first
                   `num_shared` of `num_pages` belong to the cache
    """
    running: list[RequestState] = []
    waiting: list[RequestState] = []
    for state in requests.values():
        if view.shows(state.request.namespace):
            (waiting if state.sequence is None else running).append(state)
    shown = islice((*running, *waiting), view.max_requests)
    return {
        "running": len(running),
        "waiting": len(waiting),
        "requests": [_view(state, now) for state in shown],
    }


def _view(state: RequestState, now: float) -> dict[str, Any]:
    request, sequence, lookup = state.request, state.sequence, state.lookup
    shown: dict[str, Any] = {
        "id": state.request_id,
        "namespace": request.params.namespace,
        "session": request.session,
        "priority": request.params.priority,
        "state": _state(state),
        "waits_for": None if state.producer is None else state.producer.request_id,
        "awaited_len": None if state.producer is None else state.awaited_len,
        "prompt_tokens": state.num_prompt,
        "cached_tokens": state.num_reused,
        "computed_tokens": max(0, state.num_prompt_done - state.num_reused),
        "generated_tokens": state.num_output,
        "age_s": now - state.queued_at,
        "miss": None if lookup is None else {"reason": lookup.reason, "position": lookup.position},
        "pages": [],
        "num_pages": 0,
        "num_shared": 0,
    }
    if sequence is None:
        if state.admitted_at is None:
            shown["cached_tokens"] = min(state.prefix_watch.cached_len, state.num_prompt)
        return shown
    pages = sequence.pages
    shown |= {"pages": page_runs(pages), "num_pages": len(pages)}
    shown["num_shared"] = len(pages) - sequence.num_private
    return shown


def _state(state: RequestState) -> str:
    if state.sequence is not None:
        has_prompt = state.is_decoding or state.committed >= state.num_prompt
        return "decode" if has_prompt else "prefill"
    if state.producer is not None:
        return "follows"
    return "queued" if state.admitted_at is None else "preempted"
