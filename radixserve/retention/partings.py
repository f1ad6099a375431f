"""`Partings`: where sessions' prompts left earlier ones, and where they come back to these.

A session's prompt parts from an earlier one where their tokens differ. After a compaction, an edit
or dropped thoughts what lies below the parting is the session's past. Sub-agents that share their
session's name part in the same way, but the session comes back. Which it is, is learned by the
prefix before the parting: sub-agents of one kind part from their callers at the same token.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from typing import NamedTuple

from radixserve.cache.tokens import TOKEN_BYTES

_MAX_PREFIXES = 1024  # of which returns are remembered
_MAX_COUNT = 64.0  # partings of one prefix, after which all counts are halved
_LEAST_SHARE = 0.25  # of partings that sessions came back from, from which on ends are kept
_MAX_PARTED = 16  # ends of a session that it may come back to
_MAX_PROMPTS = 64  # of a session, after which it has not come back
NUM_COMPARED = 32  # tokens after a parting that tell whether a prompt comes back


class Parting(NamedTuple):
    """A place where a session's prompt left an earlier one."""

    prefix: int  # checksum of the tokens before it
    position: int  # number of these tokens
    left: bytes  # the first tokens after it, of what was left
    prompt: int  # number of the session's prompt that left it


class SessionPartings:
    """The partings of one session that it has not come back from."""

    __slots__ = ("num_prompts", "open")

    def __init__(self) -> None:
        self.num_prompts = 0
        self.open: deque[Parting] = deque()  # the oldest first


class Partings:
    """Counts, by prefix, the partings that sessions came back from. Prefixes of which no session
    has come back take no memory."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, list[float]] = OrderedDict()  # [came back, all]

    def is_left_for_good(self, prefix: int) -> bool:
        """Whether a session does not come back to what it leaves after that prefix, as far as is
        known."""
        came_back, num_partings = self._counts.get(prefix, (0.0, 1.0))
        return came_back < _LEAST_SHARE * num_partings

    def note_prompt(self, session: SessionPartings, prompt: memoryview) -> None:
        """A session has a new prompt: count the partings that it comes back from. O(open ones)."""
        session.num_prompts += 1
        if not session.open:
            return
        still_open: deque[Parting] = deque()
        for parting in session.open:
            end = parting.position + len(parting.left) // TOKEN_BYTES
            if prompt[parting.position : end].tobytes() == parting.left:
                self._count(parting.prefix, came_back=True)
            elif session.num_prompts - parting.prompt > _MAX_PROMPTS:
                self._count(parting.prefix, came_back=False)
            else:
                still_open.append(parting)
        session.open = still_open

    def begin(self, session: SessionPartings, prefix: int, position: int, left: bytes) -> None:
        """The session's last prompt left an earlier one after `position` tokens; that one went on
        with the tokens `left`."""
        session.open.append(Parting(prefix, position, left, session.num_prompts))
        if len(session.open) > _MAX_PARTED:
            self._count(session.open.popleft().prefix, came_back=False)

    def close(self, session: SessionPartings) -> None:
        """The session was closed: it does not come back."""
        for parting in session.open:
            self._count(parting.prefix, came_back=False)
        session.open.clear()

    def _count(self, prefix: int, *, came_back: bool) -> None:
        counts = self._counts.get(prefix)
        if counts is None:
            if not came_back:
                return
            counts = self._counts[prefix] = [0.0, 0.0]
            if len(self._counts) > _MAX_PREFIXES:
                self._counts.popitem(last=False)
        self._counts.move_to_end(prefix)
        counts[0] += came_back
        counts[1] += 1.0
        if counts[1] >= _MAX_COUNT:
            counts[:] = counts[0] / 2, counts[1] / 2


def checksum(prompt: memoryview, length: int) -> int:
    """Returns a checksum of a prompt's first tokens. O(length)."""
    return zlib.crc32(prompt[:length])
