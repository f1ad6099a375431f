"""`Pace`: how many decode steps the engine asks for in one go."""

from __future__ import annotations

from radixserve.schedule import Schedule, StepOutput

LONGEST_S = 0.050  # of steps in one go: their tokens are told together


class Pace:
    """Goes by the time that the last steps took which only decoded."""

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self.num_steps = 1  # to be asked for next

    def note(self, schedule: Schedule, output: StepOutput) -> None:
        """The schedule was computed."""
        first = output.outputs[0] if output.outputs else None
        if self._most_steps == 1 or schedule.num_prefill_tokens or first is None:
            return
        step_s = sum(output.seconds.values()) / (1 + len(first.further))
        fitting = self._most_steps if step_s <= 0 else int(LONGEST_S / step_s)
        self.num_steps = max(1, min(self._most_steps, fitting))
