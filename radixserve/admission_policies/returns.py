"""`ReturnTimes`: predicts when sessions send their next request, from their past think times.

A request continues a session that it names, or the request whose prompt and answer its prompt
begins with. The time between the two is a think time.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import OrderedDict, deque

from radixserve.cache import ReturnEstimate
from radixserve.scheduler.request_state import RequestState

MAX_CONVERSATIONS = 100_000  # remembered; the one that ended first is forgotten
_LEAST_RETURNS = 4  # observed before anything is expected
_PRIOR = 1.0  # observations that the population counts for in a session's own mean
_DECAY = 0.98  # of the population's past at each observation: about 50 count
_NUM_FIRST = 32  # requests that end before prompts without a name count as sent once
_MIN_S = 1e-3  # shorter think times are all the same: the network's
_LEAST_ODDS = 0.5  # of a return, below which its time is worth nothing
_REGULAR = 0.4  # standard deviation of log think times up to which they become regular
_IRREGULAR = 0.6  # from which on they are regular no more: between the two they stay as they are
_LATE = 1.5  # such deviations after which a return is late
_MAX_TURNS = 8.0  # for which a session's growth is foreseen
# Of a session that comes back, relative to its first prompt, until a turn's growth has been seen;
# of sessions without names until a few requests have ended.
_UNKNOWN_GROWTH, _UNNAMED_GROWTH, _NUM_GROWING = 2.0, 1.0, 12
_UNKNOWN_S = 60.0  # after which a session has not come back, while no think times are known
_WAITING_S = 60.0  # for which a waiting request's prefix is evicted last
_BLOCK = 64  # tokens of a block of `_checksums`
_BLOCK_BYTES = 4 * _BLOCK

Key = str | tuple[str, int, int]  # a session, or where the tokens of a request ended


def waiting_return(now: float, cached_len: int) -> ReturnEstimate:
    """For a waiting request's prefix: evicted last, longest last."""
    return ReturnEstimate(-float(cached_len), 0.0, now + _WAITING_S, 1.0, is_regular=True)


class _Conversation:
    """What is known of a session while none of its requests is in the scheduler."""

    __slots__ = (
        "checked_len",
        "checksum",
        "ended_at",
        "first_arrival",
        "is_idle",
        "is_known",
        "is_named",
        "late_at",
        "length",
        "num_counted",
        "num_shared",
        "num_thinks",
        "num_turns",
        "sum_logs",
    )

    def __init__(self, first_arrival: int, *, is_named: bool) -> None:
        self.first_arrival = first_arrival  # arrival number of its first request
        self.is_named = is_named  # by its client; else found by its tokens
        self.is_idle = False  # none of its requests is in the scheduler
        self.num_turns = 0  # requests that have ended
        self.num_thinks = 0
        self.length = 0  # tokens when its last request ended
        self.checked_len = self.checksum = 0  # of those with which its next prompt begins
        self.num_shared = 0  # leading tokens that others had computed before its first request
        self.num_counted = 0  # its part of `ReturnTimes.returning_tokens`
        self.is_known = False  # whether these are of a session that is known to return
        self.sum_logs = 0.0  # of its think times
        self.ended_at = math.nan
        self.late_at: float | None = None  # None: not known

    @property
    def fate_key(self) -> tuple[bool, bool]:
        """By which it is counted whether sessions are continued: (named, after its first turn)."""
        return self.is_named, self.num_turns <= 1


class _Mean:
    """The mean of about the last 20 values; exact from the first one on."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        """0 before the first one."""
        return self._sum / self._weight if self._weight else 0.0

    def note(self, value: float) -> None:
        self._sum = 0.95 * self._sum + value
        self._weight = 0.95 * self._weight + 1.0


class ReturnTimes:
    """Log think times of the population and of each session: their mean and deviation."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Key, _Conversation] = OrderedDict()  # the first to end is first
        # By arrival of its request; whether this is its first one, and has not started.
        self._active: dict[int, tuple[_Conversation, bool]] = {}
        # Of which it is not known whether they are continued, the first to end is first; with the
        # number of their turns then: others have been continued since.
        self._unresolved: deque[tuple[_Conversation, int]] = deque()
        self._weight = self._mean = self._variance = 0.0  # of the population's log think times
        self._num_returns = 0
        self._are_regular = True  # think times, of the population
        self._has_names = False  # whether a request has named its session
        # by whether the session is named and whether it was its first turn: turns that were
        # continued, and all whose fate is known
        self._return_odds = {
            (is_named, is_first): [1.0, 2.0] if is_first else [2.0, 2.2]
            for is_named in (True, False)
            for is_first in (True, False)
        }
        self._mean_output, self._typical_output = 32.0, 32
        # Of ended requests: tokens, further turns of their sessions; tokens that a turn adds.
        self._mean_length, self._turns_left, self._turn_growth = _Mean(), _Mean(), _Mean()
        self._num_ended = 0
        self.num_new = 0  # waiting requests that are the first of their session, as far as known
        # Of open sessions, see `returning_tokens`, by whether they are known to return.
        self._open_tokens = [0, 0]

    def __len__(self) -> int:
        return len(self._idle)

    def note_arrival(self, state: RequestState, now: float) -> None:
        """A request was queued: it may continue a conversation. O(tokens) without a session."""
        is_named = bool(state.request.session)
        self._has_names |= is_named
        conversation = self._continued(state)
        if is_new := conversation is None:
            conversation = _Conversation(state.arrival, is_named=is_named)
            conversation.num_shared = state.prefix_watch.cached_len
        state.session_arrival = conversation.first_arrival
        conversation.is_idle = False
        if conversation.num_turns:
            self._note_think(conversation, now - conversation.ended_at)
            self._note_fate(conversation, is_continued=True)
            added = max(0, state.tokens.size - conversation.length)
            self._turn_growth.note(added + self.expected_output(state))
        self._active[state.arrival] = conversation, is_new
        self.num_new += is_new
        self._count(conversation, state.tokens.size)
        self._expire(now)

    def note_started(self, state: RequestState, cached_len: int) -> None:
        """A request starts after so many cached tokens: of a first request they are others'."""
        conversation, is_new = self._active.get(state.arrival, (None, False))
        if conversation is not None and is_new:
            self._active[state.arrival] = conversation, False
            self.num_new -= 1
            conversation.num_shared = cached_len
            self._count(conversation, state.tokens.size)

    def note_end(
        self, state: RequestState, now: float, *, is_finished: bool
    ) -> ReturnEstimate | None:
        """A request has ended; when its session will come back, None where nothing is known."""
        conversation, is_new = self._active.pop(state.arrival, (None, False))
        self.num_new -= is_new
        if conversation is None:
            return None
        if not is_finished:
            self._uncount(conversation)
            return None
        self._num_ended += 1
        conversation.num_turns += 1
        conversation.ended_at = now
        self._mean_output += 0.05 * (state.num_output - self._mean_output)
        self._typical_output = round(self._mean_output)
        conversation.length = state.tokens.size
        self._mean_length.note(conversation.length)
        self._expire(now)
        self._turns_left.note(self._expected_turns(conversation))
        expected = self._expect(conversation, now)
        conversation.late_at = None if expected is None else expected.late_at
        self._count(conversation, conversation.length)
        self._note_idle(_end_key(state, conversation), conversation)
        return expected

    def note_closed(self, name: str) -> None:
        """The session was closed: it does not come back."""
        conversation = self._idle.pop(name, None)
        if conversation is not None and conversation.is_idle:
            conversation.is_idle = False
            self._note_fate(conversation, is_continued=False)
            self._uncount(conversation)

    def expected_output(self, state: RequestState) -> int:
        """Tokens that a request will still generate."""
        size = state.tokens.size
        return max(1, min(state.length_limit, self._typical_output + state.num_prompt) - size)

    @property
    def returning_tokens(self) -> int:
        """Tokens of the open sessions that will probably return, without those that they found
        cached at first. Waiting and running ones count, and others until they are late.

        0 unless one of them is known to return: it has returned, or it has a name and named
        sessions mostly return. Until `_NUM_FIRST` requests have ended each may be a session's.
        """
        likely, known = self._open_tokens
        return known + likely if known or self._num_ended < _NUM_FIRST else 0

    @property
    def is_any_known(self) -> bool:
        """Whether an open session is known to return."""
        return self._open_tokens[True] > 0

    @property
    def growth_share(self) -> float:
        """Expected growth of sessions that return relative to their size. Until it is seen it is
        assumed, so that a first wave of sessions leaves room."""
        if not self._turn_growth.value:
            if not self._has_names and self._num_ended >= _NUM_GROWING:
                return 0.0
            unknown = _UNKNOWN_GROWTH if self._has_names else _UNNAMED_GROWTH
            continued, known = self._return_odds[self._has_names, True]
            return unknown * continued / known
        growth = self._turns_left.value * self._turn_growth.value
        return growth / max(self._mean_length.value, 1.0)

    def mean_turn(self, state: RequestState, num_tokens: int) -> float:
        """Tokens that a turn computes, the mean of a session that begins with a waiting request of
        `num_tokens`. `num_tokens` if another request came before, or it will hardly return."""
        conversation, is_new = self._active.get(state.arrival, (None, False))
        growth = self._turn_growth.value
        if conversation is None or not (is_new and conversation.num_counted and growth):
            return num_tokens
        num_turns = self._expected_turns(conversation)
        return (num_tokens + num_turns * growth) / (1.0 + num_turns)

    # -- inside -------------------------------------------------------------------------------

    def _count(self, conversation: _Conversation, num_tokens: int) -> None:
        """Count an open session as one of so many tokens, if those of its kind mostly return."""
        self._uncount(conversation)
        continued, known = self._return_odds[conversation.fate_key]
        if continued >= _LEAST_ODDS * known:
            conversation.is_known = conversation.is_named or conversation.num_thinks > 0
            conversation.num_counted = max(0, num_tokens - conversation.num_shared)
            self._open_tokens[conversation.is_known] += conversation.num_counted

    def _uncount(self, conversation: _Conversation) -> None:
        self._open_tokens[conversation.is_known] -= conversation.num_counted
        conversation.num_counted = 0

    def _note_idle(self, key: Key, conversation: _Conversation) -> None:
        """Its last request has ended. Of several with one key the last one may be continued."""
        conversation.is_idle = True
        self._unresolved.append((conversation, conversation.num_turns))
        if (other := self._idle.pop(key, None)) is not None:
            self._uncount(other)
        self._idle[key] = conversation
        if len(self._idle) > MAX_CONVERSATIONS:
            self._uncount(self._idle.popitem(last=False)[1])
        if len(self._unresolved) > MAX_CONVERSATIONS:
            self._uncount(self._unresolved.popleft()[0])

    def _expected_turns(self, conversation: _Conversation) -> float:
        """Further turns of a session, one of whose requests has just ended."""
        continued, known = self._return_odds[conversation.is_named, False]
        later = min(_MAX_TURNS, continued / max(known - continued, 1e-9))
        if conversation.num_turns > 1:
            return max(0.5 * later, later + 1.0 - conversation.num_turns)
        continued, known = self._return_odds[conversation.fate_key]
        return min(_MAX_TURNS, (1.0 + later) * continued / known)

    def _continued(self, state: RequestState) -> _Conversation | None:
        name = state.request.session
        if name:
            return self._idle.pop(name, None)
        if not self._idle:
            return None
        namespace, idle = state.request.params.namespace, self._idle
        sums = _checksums(state)
        for index in range(len(sums) - 1, -1, -1):  # the longest one first
            key = namespace, index, sums[index]
            conversation = idle.get(key)
            if conversation is not None and _begins_with(state, sums, conversation):
                return idle.pop(key)
        return None

    def _expect(self, conversation: _Conversation, now: float) -> ReturnEstimate | None:
        if self._num_returns < _LEAST_RETURNS:
            return None
        count = conversation.num_thinks
        mean = (_PRIOR * self._mean + conversation.sum_logs) / (_PRIOR + count)
        return self._estimate(mean, conversation.fate_key, now)

    def typical(self, now: float) -> ReturnEstimate | None:
        """What is expected of a session of which nothing is known; None until something is."""
        if self._num_returns < _LEAST_RETURNS:
            return None
        return self._estimate(self._mean, (self._has_names, True), now)

    def _estimate(self, mean: float, fate_key: tuple[bool, bool], now: float) -> ReturnEstimate:
        deviation = math.sqrt(self._variance)
        continued, known = self._return_odds[fate_key]
        late_s = 1.25 * math.exp(mean + _LATE * deviation) + 2 * _MIN_S
        # An unusually long pause is better kept in order of recency.
        is_regular = self._are_regular and mean <= self._mean + 1.0
        is_regular &= continued >= _LEAST_ODDS * known
        return_at = now + math.exp(mean)
        return ReturnEstimate(
            return_at, return_at - now, now + late_s, continued / known, is_regular
        )

    def _note_think(self, conversation: _Conversation, seconds: float) -> None:
        value = math.log(max(seconds, _MIN_S))
        count = conversation.num_thinks
        if self._num_returns:
            own = (_PRIOR * self._mean + conversation.sum_logs) / (_PRIOR + count)
            self._variance += (1 - _DECAY) * ((value - own) ** 2 - self._variance)
            if self._num_returns < 20:  # few: the plain mean of the squares
                self._variance += ((value - own) ** 2 - self._variance) / (self._num_returns + 1)
        limit = _IRREGULAR if self._are_regular else _REGULAR
        self._are_regular = self._variance <= limit**2
        self._weight = self._weight * _DECAY + 1.0
        self._mean += (value - self._mean) / self._weight
        self._num_returns += 1
        conversation.num_thinks += 1
        conversation.sum_logs += value

    def _note_fate(self, conversation: _Conversation, *, is_continued: bool) -> None:
        odds = self._return_odds[conversation.fate_key]
        odds[0] = odds[0] * _DECAY + is_continued
        odds[1] = odds[1] * _DECAY + 1.0

    def _expire(self, now: float) -> None:
        """Conversations that are late have probably ended: count that. O(1) amortised."""
        late_s = _UNKNOWN_S
        if (typical := self.typical(now)) is not None:
            late_s = typical.late_at - now
        while self._unresolved:
            conversation, num_turns = self._unresolved[0]
            if conversation.is_idle and conversation.num_turns == num_turns:
                late_at = conversation.late_at
                if now < (conversation.ended_at + late_s if late_at is None else late_at):
                    return
                self._note_fate(conversation, is_continued=False)
                self._uncount(conversation)
            self._unresolved.popleft()


def _checksums(state: RequestState) -> array[int]:
    """[n] of the first 1, 2, ... n whole blocks of its tokens."""
    data, value = state.tokens.view().tobytes(), 0
    sums = array("Q")
    for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        value = zlib.crc32(data[start : start + _BLOCK_BYTES], value)
        sums.append(value)
    return sums


def _checksum(state: RequestState, sums: array[int], length: int) -> int:
    """Of its first `length` tokens. O(1)."""
    num_blocks = length // _BLOCK
    rest = state.tokens.view(num_blocks * _BLOCK, length).tobytes()
    return zlib.crc32(rest, sums[num_blocks - 1] if num_blocks else 0)


def _begins_with(state: RequestState, sums: array[int], conversation: _Conversation) -> bool:
    length = conversation.checked_len
    return state.tokens.size > length and conversation.checksum == _checksum(state, sums, length)


def _end_key(state: RequestState, conversation: _Conversation) -> Key:
    """The key of a conversation whose request has ended. Without a session it also notes what the
    next prompt begins with: the prompt and half of the answer, the end of which clients change.
    The prompt alone is not enough: it may be sent again, or be the head of others."""
    if state.request.session:
        return state.request.session
    sums = _checksums(state)
    if not sums:
        return (state.request.params.namespace, -1, -state.arrival)
    conversation.checked_len = state.tokens.size - state.num_output // 2
    conversation.checksum = _checksum(state, sums, conversation.checked_len)
    return (state.request.params.namespace, len(sums) - 1, sums[-1])
