"""`play`: a short script of requests on a small real cache, with the state after each action.

A script is a list of actions, each a dict:

    {"add": NAME, "prompt": TEXT or [token ids]}    begins a request and computes its prompt
    {"step": NAME, "tokens": TEXT or [token ids]}   appends generated tokens
    {"finish": NAME}                                ends it; its full pages stay cached

A token of a text is a word. An action for which pages are missing changes nothing but "error".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, HashBlockCache, OutOfPages, PrefixCache, RadixCache
from radixserve.checks import check_choice, shown
from radixserve.errors import InvalidRequest

NUM_PAGES, PAGE_SIZE = 24, 4
MOST_ACTIONS, MOST_TOKENS = 60, NUM_PAGES * PAGE_SIZE
CACHES = ("radix", "hash", "off")
_ACTIONS = {"add": "prompt", "step": "tokens", "finish": None}  # with the field of their tokens


@dataclass(slots=True)
class _Request:
    sequence: CacheSequence
    cached: int
    tokens: list[int]


@dataclass(slots=True)
class _Player:
    cache: PrefixCache
    words: dict[str, int] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)

    def act(self, action: Mapping[str, Any], place: int) -> dict[str, Any]:
        """Returns the state after an action. Raises InvalidRequest for a wrong one."""
        kind, name, tokens = self._read(action, place)
        before = self.cache.stats()["evicted_tokens"]
        error, cached, computed = None, 0, 0
        try:
            if kind == "add":
                cached = self._add(name, tokens)
                computed = len(tokens) - cached
            elif kind == "step":
                self._append(self.requests[name], tokens)
                computed = len(tokens)
            else:
                self.requests.pop(name).sequence.release()
        except OutOfPages:
            error = "no page is free, and none can be evicted"
            cached = computed = 0
        self.cache.check()
        return {
            "action": {kind: name},
            "cached_tokens": cached,
            "computed_tokens": computed,
            "evicted_tokens": self.cache.stats()["evicted_tokens"] - before,
            "error": error,
            "pages": self._pages(),
            "requests": [
                {
                    "name": name,
                    "cached_tokens": request.cached,
                    "tokens": self._texts(request.tokens),
                    "pages": request.sequence.pages.tolist(),
                }
                for name, request in self.requests.items()
            ],
        }

    def _read(self, action: Mapping[str, Any], place: int) -> tuple[str, str, IntArray]:
        where = f"script[{place}]"
        kinds = [kind for kind in _ACTIONS if kind in action]
        if len(kinds) != 1:
            raise InvalidRequest(f"{where} needs one of add, step and finish, got {shown(action)}")
        (kind,) = kinds
        name, needed = action[kind], _ACTIONS[kind]
        if not isinstance(name, str) or not 0 < len(name) <= 32:
            raise InvalidRequest(f"{where}: a request's name has 1 to 32 characters")
        if unknown := set(action) - {kind, needed}:
            raise InvalidRequest(f"{where} has no {sorted(unknown)[0]!r}")
        if (kind == "add") == (name in self.requests):
            raise InvalidRequest(
                f"{where}: the request {shown(name)} is "
                + ("open already" if kind == "add" else "not open")
            )
        if needed is None:
            return kind, name, np.empty(0, np.int32)
        tokens = self._tokens(action.get(needed), f"{where}.{needed}")
        return kind, name, tokens

    def _tokens(self, given: Any, where: str) -> IntArray:
        ids = given
        if isinstance(given, str):
            ids = [self.words.setdefault(word, len(self.words)) for word in given.split()]
        good = isinstance(ids, list) and 0 < len(ids) <= MOST_TOKENS
        if not good or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise InvalidRequest(
                f"{where} must be 1 to {MOST_TOKENS} words or token ids, got {shown(given)}"
            )
        return np.asarray(ids, np.int32)

    def _add(self, name: str, tokens: IntArray) -> int:
        sequence = self.cache.acquire(tokens)
        cached = sequence.cached_len
        try:
            sequence.extend(tokens[cached:])
        except OutOfPages:
            sequence.release()
            raise
        sequence.commit(len(tokens))
        self.requests[name] = _Request(sequence, cached, tokens.tolist())
        return cached

    def _append(self, request: _Request, tokens: IntArray) -> None:
        request.sequence.extend(tokens)
        request.tokens += tokens.tolist()
        request.sequence.commit(len(request.tokens))

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        names = {number: word for word, number in self.words.items()}
        return [names.get(token, str(token)) for token in tokens]

    def _pages(self) -> list[dict[str, Any]]:
        """Each page: its owner ("free", "tree" or "private"), the requests that use it, and its
        tokens."""
        pages = [{"owner": "free", "requests": [], "tokens": []} for _ in range(NUM_PAGES)]
        roots = self.cache.dump(10_000)["namespaces"].values()
        nodes: list[Any] = [*roots]
        while nodes:
            node = nodes.pop()
            nodes += node["children"]
            for held, number in enumerate(node["pages"]):
                first = held * PAGE_SIZE
                tokens = self._texts(node["tokens"][first : first + PAGE_SIZE])
                pages[number] |= {"owner": "tree", "tokens": tokens}
        for name, request in self.requests.items():
            for place, number in enumerate(request.sequence.pages.tolist()):
                if pages[number]["owner"] == "free":
                    pages[number]["owner"] = "private"
                own = request.tokens[place * PAGE_SIZE : (place + 1) * PAGE_SIZE]
                pages[number]["tokens"] = self._texts(own)
                pages[number]["requests"].append(name)  # type: ignore[attr-defined]
        return pages


def play(script: Sequence[Mapping[str, Any]], cache: str = "radix") -> list[dict[str, Any]]:
    """The states after the actions of a script. Raises InvalidRequest.

    cache  "radix", "hash" or "off", with 24 pages of 4 tokens
    """
    check_choice("cache", cache, CACHES)
    if not isinstance(script, list) or len(script) > MOST_ACTIONS:
        raise InvalidRequest(f"script must be a list of at most {MOST_ACTIONS} actions")
    made: PrefixCache = (
        HashBlockCache(NUM_PAGES, PAGE_SIZE)
        if cache == "hash"
        else RadixCache(NUM_PAGES, PAGE_SIZE, reuse=cache != "off")
    )
    player = _Player(made)
    states = []
    for place, action in enumerate(script):
        if not isinstance(action, Mapping):
            raise InvalidRequest(f"script[{place}] must be an object, got {shown(action)}")
        states.append(player.act(action, place))
    return states
