"""A device that computes nothing: how long a step takes, and the tokens that were drawn then."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.arrays import IntArray
from radixserve.checks import check_float
from radixserve.schedule import ModelRunnerOutput, SampleOutput, ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step: a sum of four terms. The rows read K/V once a row, up to its end.

    The defaults are those of a model of 8 billion parameters in bfloat16, with 128 KiB of K/V a
    token, on a GPU that moves 2.6 TB/s and computes 600 TFLOP/s: 16 GB of weights a step and some
    overhead; 16 GFLOP a prefilled token; sampling and bookkeeping of a row; 128 KiB a K/V token.
    """

    fixed_s: float = 0.007
    prefill_token_s: float = 27e-6
    decode_row_s: float = 20e-6
    kv_token_s: float = 50e-9

    def __post_init__(self) -> None:
        for name in ("fixed_s", "prefill_token_s", "decode_row_s", "kv_token_s"):
            check_float(name, getattr(self, name), 0.0, 1e6)

    def seconds(self, schedule: SchedulerOutput) -> float:
        num_read = sum(row.end for row in schedule.rows)
        return (
            self.fixed_s
            + self.prefill_token_s * schedule.num_prefill_tokens
            + self.decode_row_s * schedule.num_decode_tokens
            + self.kv_token_s * num_read
        )


class RecordedDevice:
    """Answers a `SchedulerOutput` with the outputs that the trace has recorded, in no time."""

    def __init__(self) -> None:
        self._outputs: dict[str, IntArray] = {}

    def expect(self, request_id: str, output: IntArray) -> None:
        """That request will draw these tokens, and token 0 where there is none."""
        self._outputs[request_id] = output

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        del self._outputs[request_id]

    def answer(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(tuple(self._draw(row) for row in schedule.rows), {})

    def _draw(self, row: ScheduledRequest) -> SampleOutput | None:
        if row.sample is None:
            return None
        output, index = self._outputs[row.request_id], row.end - row.sample.num_prompt
        return SampleOutput(int(output[index]) if index < len(output) else 0, None, ())
