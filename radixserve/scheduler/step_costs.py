"""`StepCosts`: what decode steps and prefilled tokens cost, measured from the steps themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

_DECAY = 0.95  # of earlier steps in the measured costs
_RECENT_S = 60.0  # for which a step counts in the share of prefill
_MIN_PREFILL = 16  # prefill tokens of a step that is a measurement of their cost


class StepCosts:
    """Seconds of a decode step and of a prefilled token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        # The latest steps: when each began and ended, its prefill tokens, its decode tokens.
        self.unread: list[tuple[float, float, int, int]] = []
        self._updated_at = 0.0
        self.decode_step_s = 0.0  # as of the last `read`
        self._decode_tokens = 0.0  # computed in such a step, those of short prefills among them
        self._prefill_s = self._prefill_tokens = 0.0  # beyond those of a decode step
        self._recent_s = self._recent_prefill_s = 0.0  # of steps in about the last minute

    @property
    def prefill_token_s(self) -> float:
        self.read()
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    @property
    def shared_step_s(self) -> float:
        """Seconds of a decode step that all its rows share: each row is taken to cost as much as a
        prefilled token besides."""
        token_s = self.prefill_token_s
        return max(0.0, self.decode_step_s - self._decode_tokens * token_s)

    @property
    def prefill_share(self) -> float:
        """Share of prefill in the time of the steps of about the last minute, 0.0 to 1.0."""
        self.read()
        return self._recent_prefill_s / self._recent_s if self._recent_s else 0.0

    def read(self) -> None:
        """Count the steps of `unread`, and empty it."""
        for begun_at, ended_at, num_prefill, num_decode in self.unread:
            seconds = ended_at - max(begun_at, self._updated_at)
            decay = math.exp((self._updated_at - ended_at) / _RECENT_S)
            self._updated_at = ended_at
            self._recent_s = self._recent_s * decay + seconds
            self._recent_prefill_s *= decay
            if num_prefill < _MIN_PREFILL:
                weight = 0.1 if self.decode_step_s else 1.0
                self.decode_step_s += weight * (seconds - self.decode_step_s)
                self._decode_tokens += weight * (num_prefill + num_decode - self._decode_tokens)
            else:
                prefill_s = max(0.0, seconds - self.decode_step_s)
                # Of a step with fewer rows than usual, half of the prefill at least.
                num_more = max(num_prefill + num_decode - self._decode_tokens, 0.5 * num_prefill)
                self._recent_prefill_s += prefill_s
                self._prefill_s = self._prefill_s * _DECAY + prefill_s
                self._prefill_tokens = self._prefill_tokens * _DECAY + num_more
        self.unread.clear()

    def tokens_beside_decodes(self, max_tokens: int) -> int:
        """Prefill tokens that take as long as a decode step, at most `max_tokens`: these as long
        as one of the costs is not known."""
        token_s = self.prefill_token_s
        if not self.decode_step_s or not token_s:
            return max_tokens
        return min(max(round(self.decode_step_s / token_s), _MIN_PREFILL), max_tokens)
