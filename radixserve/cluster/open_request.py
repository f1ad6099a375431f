"""`OpenRequest`: a request of a caller, wherever it runs."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from radixserve.engine.output_collector import OutputCollector
from radixserve.output import Finish, RequestOutput
from radixserve.request import Request


class OpenRequest:
    """It has not ended. Its collector has the tokens that came so far, from all its replicas."""

    def __init__(self, collector: OutputCollector) -> None:
        self.collector = collector
        self.id = ""  # by which the replica knows it: another one wherever it goes
        self.replica: str | None = None  # where it runs; None: it waits for one
        self.num_lost = 0  # replicas that ended under it
        self.lost_at = time.monotonic()  # when it last left one, or came
        self._has_moved = False  # several replicas have made its tokens
        self._num_repeated = 0  # tokens still to come that its caller has already
        self._has_stopped = False  # at a stop string: only the end is still to come

    @property
    def request_id(self) -> str:
        """By which its caller knows it."""
        return self.collector.request.request_id

    def rest(self) -> Request:
        """The request for what its caller does not have yet."""
        known = self.collector.token_ids
        request = replace(self.collector.request, request_id=self.id, grammar=None)
        if not known or request.beams is not None:
            return request
        if request.logprob_targets is not None:  # the prompt's scores come with the end
            self._num_repeated = len(known)
            return request
        ids = np.concatenate([request.token_ids, np.array(known, np.int32)])
        return replace(request, token_ids=ids, num_generated=len(known))

    def note_lost(self) -> None:
        """Its replica has ended."""
        self.note_moved()
        self.num_lost += 1

    def note_moved(self) -> None:
        """It goes on elsewhere."""
        self.replica, self._has_moved = None, True
        self.lost_at = time.monotonic()

    def push(self, output: RequestOutput) -> None:
        """Pass on what a replica made."""
        num_dropped = len(output.token_ids) if self._has_stopped else self._num_repeated
        if num_dropped and output.token_ids:
            self._num_repeated = max(0, self._num_repeated - len(output.token_ids))
            output = output._replace(
                token_ids=output.token_ids[num_dropped:],
                logprobs=output.logprobs[num_dropped:],
                top_logprobs=output.top_logprobs[num_dropped:],
            )
        if output.finish is not None and self._has_moved:
            output = output._replace(finish=self._whole(output, output.finish))
        self._has_stopped |= self.collector.push(output)

    def _whole(self, output: RequestOutput, finish: Finish) -> Finish:
        """As of one engine that made all of the answer."""
        usage = finish.usage
        if self.collector.request.beams is None:
            usage = usage.with_answer(len(self.collector.token_ids) + len(output.token_ids))
        total_s = time.time() - self.collector.made_at
        return replace(finish, usage=usage, metrics=replace(finish.metrics, total_s=total_s))
