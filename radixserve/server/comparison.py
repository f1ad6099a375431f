"""`Comparison`: one short script with the radix cache, the hash cache and none, side by side."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from radixserve.api.runtime import Runtime
from radixserve.request import SamplingParams

Played = tuple[list[dict[str, Any]], list[list[int]]]  # the requests, and the ids of each answer
BLOCK = 16  # tokens a page, for all three
_TRIES = 2  # taking turns; the faster one counts
_CACHES = ("radix", "hash", "off")
_PAGES = 512
_TOKENS = 12  # of each answer
_SYSTEM = """\
You are a helpful assistant for the Python standard library. Keep your answers short. Name the \
module a function is in. Use the wording of the documentation. Write code in backquotes. If you do \
not know the answer, say so.

Notes on list.sort: sort the list in place, using only comparisons between items. The argument \
`key` is a function of one argument that is called once for each item. The sort is stable: items \
that compare equal keep their order.

Notes on shutil.copy: copy the file `src` to the file or directory `dst`. The contents and the \
permission bits are copied; other metadata, such as the times of creation and modification, is not.

Notes on generators: a function that contains `yield` returns an iterator. Its body runs up to the \
next `yield` each time that an item is asked for, and goes on from there the next time."""
_CHATS = (
    ("How do I sort a list?", "What is a lambda?"),
    ("How do I copy a file?", "How do I delete a file?"),
    ("What is a generator?", "What is an iterator?"),
)
_BRANCHES = ("Give an example.", "Why is that so?", "Is there another way?")


class Comparison:
    """Owned by the event loop; the script runs in a thread, on three Runtimes one after another."""

    def __init__(self) -> None:
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def run(self) -> dict[str, Any]:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(compare))
        return await asyncio.shield(self._running)


def compare() -> dict[str, Any]:
    """{"caches": [{"cache", "requests": [{"title", "cached_tokens", "computed_tokens", "time_s"}],
    "cached_tokens", "computed_tokens", "time_s"}], "same_answers"}."""
    runs, answers = [], []
    tries = [[_run(cache) for cache in _CACHES] for _ in range(_TRIES)]
    for cache, of_cache in zip(_CACHES, zip(*tries, strict=True), strict=True):
        requests, ids = min(of_cache, key=lambda played: sum(one["time_s"] for one in played[0]))
        answers.append(ids)
        sums = {
            name: sum(one[name] for one in requests)
            for name in ("cached_tokens", "computed_tokens", "time_s")
        }
        runs.append({"cache": cache, "requests": requests, **sums})
    same = all(ids == answers[0] for ids in answers)
    return {"model": "demo", "page_size": BLOCK, "caches": runs, "same_answers": same}


def _run(cache: str) -> Played:
    with Runtime("demo", cache=cache, page_size=BLOCK, num_pages=_PAGES, device="cpu") as runtime:
        return _play(runtime)


def _play(runtime: Runtime) -> Played:
    """Chats of two turns under one system prompt, then three branches from the end of the last."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0)
    runtime.generate("warm up " * 40, params, progress=False)
    runtime.flush_cache()
    found: list[dict[str, Any]] = []
    ids: list[list[int]] = []

    def ask(title: str, messages: list[dict[str, str]]) -> str:
        start = time.perf_counter()
        done = runtime.generate(messages, params, progress=False)
        ids.append(done.token_ids)
        found.append({
            "title": title,
            "cached_tokens": done.usage.cached_tokens,
            "computed_tokens": done.usage.computed_tokens,
            "time_s": time.perf_counter() - start,
        })  # fmt: skip
        return done.text

    history: list[dict[str, str]] = []
    for number, (first, second) in enumerate(_CHATS, 1):
        history = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": first}]
        text = ask(f"chat {number}, first turn: {first}", history)
        history += [_message("assistant", text), _message("user", second)]
        text = ask(f"chat {number}, second turn: {second}", history)
        history.append(_message("assistant", text))
    for number, branch in enumerate(_BRANCHES, 1):
        ask(
            f"branch {number} of chat {len(_CHATS)}: {branch}", [*history, _message("user", branch)]
        )
    return found, ids


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
