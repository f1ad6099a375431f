"""Requests as they run and wait, for snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from radixserve.cache.snapshot import SnapshotView, page_runs
from radixserve.scheduler.request_state import RequestState


class RequestSnapshots:
    """The scheduler's requests, read only."""

    def __init__(self, requests: Mapping[str, RequestState], clock: Callable[[], float]) -> None:
        self._requests = requests  # by id
        self._clock = clock

    def take(self, view: SnapshotView) -> dict[str, Any]:
        """{"running", "waiting": how many, "requests": running first, up to view.max_requests}.

        Each has {"id", "namespace", "session", "priority", "state", "waits_for", "awaited_len",
        "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "age_s", "miss",
        "pages", "num_pages", "num_shared"}. state: "prefill", "decode", "queued", "follows"
        (another request computes tokens that it needs: "waits_for", until "awaited_len") or
        "preempted". cached_tokens: of a queued one what it would find now. pages: its table as
        runs of consecutive ids, [[first, count], ...]; the first `num_shared` of `num_pages` belong
        to the cache. O(requests).
        """
        running: list[RequestState] = []
        waiting: list[RequestState] = []
        for state in self._requests.values():
            if view.shows(state.request.params.namespace):
                (waiting if state.sequence is None else running).append(state)
        now, shown = self._clock(), islice((*running, *waiting), view.max_requests)
        return {
            "running": len(running),
            "waiting": len(waiting),
            "requests": [_view(state, now) for state in shown],
        }


def _view(state: RequestState, now: float) -> dict[str, Any]:
    request, sequence, lookup = state.request, state.sequence, state.lookup
    found: dict[str, Any] = {
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
        "age_s": now - state.times.queued,
        "miss": None if lookup is None else {"reason": lookup.reason, "position": lookup.position},
        "pages": [],
        "num_pages": 0,
        "num_shared": 0,
    }
    if sequence is None:
        if state.times.admitted is None:
            found["cached_tokens"] = min(state.prefix_watch.cached_len, state.num_prompt)
        return found
    pages = sequence.pages
    found |= {"pages": page_runs(pages), "num_pages": len(pages)}
    found["num_shared"] = len(pages) - sequence.num_private
    return found


def _state(state: RequestState) -> str:
    if state.sequence is not None:
        has_prompt = state.is_decoding or state.committed >= state.num_prompt
        return "decode" if has_prompt else "prefill"
    if state.producer is not None:
        return "follows"
    return "queued" if state.times.admitted is None else "preempted"
