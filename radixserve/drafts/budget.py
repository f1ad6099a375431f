"""`DraftBudget`: how many drafts a step takes by measured costs. `Odds`: how many are right."""

from __future__ import annotations

DEFAULT_DRAFTS = 32  # of a row, at most
MOST_ROWS = 16  # of a step with drafts
_SHARE = 0.1  # of a new measurement in an average
_FIRST_COST = 0.12  # of a further token, in steps of one row, before it was measured
_FORGOTTEN = 0.05  # of a measured cost, with some steps that had no drafts: it is measured again
_LEAST_COST, _MOST_COST = 0.005, 1.0
_MARGIN = 1.1  # of the tokens per second that a draft must gain, since costs are averages
_MEMORY = 0.85  # of earlier drafts, and of the first odds, with each verified draft of a request
_WEIGHT = 2.0  # of the first odds, in tokens
_LEARNED = 0.05  # of a verified draft's share of right tokens, in the first odds of later requests
_UNLEARNED = 0.02  # of what they have learned, with each request
_LEAST_FIRST = 0.3  # for one row alone such odds are still tried
_REST_TOKENS = 16  # without drafts after some that did not pay, the first time
_MOST_REST = 256


class DraftBudget:
    """The cost of a draft beside the rows of a step: a step with R rows takes `plain_s[R]` without
    drafts, and each draft the share `cost[R]` of that more."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: most drafts of a row."""
        self.max_tokens = max_tokens
        self._plain_s = [0.0] * (MOST_ROWS + 1)
        self._cost = [_first_cost(num_rows) for num_rows in range(MOST_ROWS + 1)]

    def note_step(self, num_rows: int, num_drafts: int, seconds: float, num_steps: int = 1) -> None:
        """A step of decode rows alone was computed; or `num_steps` without drafts, of which each
        took so long."""
        if num_rows > MOST_ROWS:
            return
        plain_s, cost = self._plain_s[num_rows], self._cost[num_rows]
        # One slow step, of a busy machine, counts as twice the usual time at most.
        if not num_drafts:
            seconds = min(seconds, 2 * plain_s) if plain_s else seconds
            share = 1.0 - (1.0 - _SHARE) ** num_steps if plain_s else 1.0
            self._plain_s[num_rows] += share * (seconds - plain_s)
            self._cost[num_rows] += share * _FORGOTTEN * (_first_cost(num_rows) - cost)
        elif plain_s:
            found = (seconds - plain_s) / (num_drafts * plain_s)
            found = min(max(found, _LEAST_COST), 2 * cost, _MOST_COST)
            self._cost[num_rows] += _SHARE * (found - cost)

    def may_pay(self, num_rows: int) -> bool:
        """Whether a draft that is certainly right raises the tokens per second."""
        return num_rows <= MOST_ROWS and num_rows * self._cost[num_rows] * _MARGIN < 1.0

    def length(self, odds: float, num_rows: int, num_drafts: int, num_expected: float) -> int:
        """Returns how many drafts of a row raise the tokens per second of a step, where each is
        right with `odds` if those before it are. The step has `num_drafts` drafts of other rows,
        of which `num_expected` are expected to be right."""
        if num_rows > MOST_ROWS or not self._plain_s[num_rows]:
            return 0  # a step without drafts is measured first
        cost, gain, length = self._cost[num_rows], odds, 0
        time, tokens = 1.0 + num_drafts * cost, num_rows + num_expected
        while length < self.max_tokens and gain * time > tokens * cost * _MARGIN:
            time, tokens = time + cost, tokens + gain
            gain *= odds
            length += 1
        return length


def _first_cost(num_rows: int) -> float:
    """Of a further token, in steps of so many rows."""
    return _FIRST_COST / (1.0 + _FIRST_COST * (num_rows - 1))


class FirstOdds:
    """How often a source's drafts are right before a request has shown it, by requests before."""

    def __init__(self, given: float) -> None:
        """`given`: before any."""
        self._given = self._value = given

    def of_request(self) -> float:
        """Returns the first odds of another request. Each forgets a little, so that a source that
        does not pay is tried again."""
        self._value += _UNLEARNED * (self._given - self._value)
        return max(self._value, _LEAST_FIRST)

    def note(self, num_drafts: int, num_right: int) -> None:
        """Drafts were verified, up to the first that was wrong."""
        num_seen = num_right + (num_right < num_drafts)
        self._value += _LEARNED * (num_right / num_seen - self._value)


class Odds:
    """How often the drafts of a source are right for one request, the latest above all; and the
    rests after those that were not."""

    __slots__ = ("_first", "_num_right", "_num_seen", "_rest", "rests_until")

    def __init__(self, first: float) -> None:
        self._first = first
        self._num_right, self._num_seen = _WEIGHT * first, _WEIGHT
        self._rest = _REST_TOKENS
        self.rests_until = 0  # number of the request's tokens

    @property
    def value(self) -> float:
        return self._num_right / self._num_seen

    def note(self, num_drafts: int, num_right: int) -> None:
        """Drafts were verified, up to the first that was wrong."""
        num_seen = num_right + (num_right < num_drafts)
        self._num_right = self._num_right * _MEMORY + num_right
        self._num_seen = self._num_seen * _MEMORY + num_seen
        if num_right == num_drafts:
            self._rest = _REST_TOKENS

    def rest(self, num_tokens: int) -> None:
        """Drafts do not pay at `num_tokens` tokens: none for a while, each time longer. Afterwards
        the first odds count again in part."""
        self.rests_until = num_tokens + self._rest
        self._rest = min(2 * self._rest, _MOST_REST)
        self._num_right = (self._num_right + _WEIGHT * self._first) / 2
        self._num_seen = (self._num_seen + _WEIGHT) / 2
