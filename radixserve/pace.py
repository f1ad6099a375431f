"""`Pace`: how many decode steps the engine asks for in one go."""

from __future__ import annotations

from radixserve.schedule import Schedule, StepOutput

# Of steps in one go, whose tokens are told together:
LONGEST_S = 0.050  # while somebody reads them as they come
UNREAD_S = 1.0  # while all wait for whole answers


class Pace:
    """Goes by the time that the last steps took which only decoded."""

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self._step_s: float | None = None

    def num_steps(self, *, is_read: bool) -> int:
        """To be asked for next; `is_read`: somebody reads tokens as they come."""
        if self._step_s is None or self._most_steps == 1:
            return 1
        most_s = LONGEST_S if is_read else UNREAD_S
        if self._step_s * self._most_steps <= most_s:
            return self._most_steps
        return max(1, int(most_s / self._step_s))

    def note(self, schedule: Schedule, output: StepOutput) -> None:
        """The schedule was computed."""
        first = output.outputs[0] if output.outputs else None
        if first is not None and not schedule.num_prefill_tokens:
            self._step_s = sum(output.seconds.values()) / (1 + len(first.further))
