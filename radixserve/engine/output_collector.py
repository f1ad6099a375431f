"""`OutputCollector`: converts a request's engine outputs to text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from radixserve.completion import Chunk, Completion, FinishReason, PromptTokens
from radixserve.output import Finish, Metrics, RequestOutput, Usage, single_tokens
from radixserve.request import Request, StopCheck
from radixserve.text.prediction import count_matched
from radixserve.text.tokenizer import StopStringMatcher, Tokenizer

Event = Chunk | Completion | tuple[Completion, ...] | BaseException


class OutputCollector:
    """Collects a request's outputs and passes chunks or the completion to `notify`.

    The engine's thread calls `push`. A streaming caller gets a Chunk for each piece of text; every
    caller gets exactly one last event: the Completion (in the last Chunk when streaming) or an
    exception.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        notify: Callable[[Event], None],
        *,
        streams: bool,
    ) -> None:
        self.request = request
        self.made_at = time.time()  # seconds since 1970
        self._made = time.monotonic()  # the same moment on a clock that is never set back
        self._notify = notify
        self.streams = streams
        self.submission = -1  # set when it is submitted
        self.is_stopped: StopCheck | None = None  # of a beam search with stop strings
        self._prompt = PromptTokens(
            request.token_ids[: request.num_prompt],
            None if tokenizer is None else partial(tokenizer.decode, keep_special=True),
        )
        self._text = None
        params = request.params
        if tokenizer is not None and request.has_answer:
            self._text = tokenizer.detokenizer(
                request.token_ids[: request.num_prompt],
                keep_special=tuple(params.keep_special_ids) if params.skip_special_tokens else True,
            )
        self._stop: StopStringMatcher | None = None
        if stops := tuple(params.stop):
            self._stop = StopStringMatcher(stops, include=params.include_stop_str_in_output)
        self._is_eager = streams or bool(params.stop)  # text is needed at once
        self._pieces: list[str] = []  # the text so far
        self._pending_text: list[str] = []  # the pieces not yet sent in a chunk
        self._token_ids: list[int] = request.token_ids[request.num_prompt :].tolist()
        self._num_sent = len(self._token_ids)  # tokens sent in chunks, here or before
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._cached_tokens = 0  # of the prompt
        self._has_ended = False
        if self._is_eager and self._text is not None and self._token_ids:
            self._add_text(self._text.push(self._token_ids))
            self._pending_text.clear()

    @property
    def age_s(self) -> float:
        """Seconds since the request was made."""
        return time.monotonic() - self._made

    @property
    def token_ids(self) -> list[int]:
        """Tokens generated so far; read-only."""
        return self._token_ids

    def push(self, output: RequestOutput) -> bool:
        """Process one step's output. Returns True if a stop string matched: the caller ends the
        request."""
        if self._has_ended:
            return False
        finish = output.finish
        if finish is not None and finish.error is not None:
            self.fail(finish.error)
            return False
        self._cached_tokens = output.cached_tokens
        if self._stop is None or len(output.token_ids) < 2:
            self._add_tokens(output)
        else:  # the answer ends with the token that completes a stop string
            for part in single_tokens(output):
                self._add_tokens(part)
                if self._has_stop_string:
                    break
        if finish is not None:
            self._complete(finish)
        elif self.streams:
            self._send_chunk()
        return self._stop is not None and self._stop.is_stopped and not self._has_ended

    def _add_tokens(self, output: RequestOutput) -> None:
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._top_logprobs += output.top_logprobs
        if self._is_eager and self._text is not None and output.token_ids:
            visible = output.token_ids[: -1 if self._hides_last(output.finish) else None]
            self._add_text(self._text.push(visible))

    def aborted(self) -> RequestOutput:
        """Returns the last output of a request that ends while no engine has it."""
        usage = Usage(0, 0, 0, len(self._token_ids))
        finish = Finish("abort", usage, Metrics(None, None, self.age_s), None)
        return RequestOutput(self.request.request_id, (), (), (), finish)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self._has_ended:
            self._has_ended = True
            self._notify(error)

    @property
    def _has_stop_string(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop is not None and self._stop.is_stopped

    def _hides_last(self, finish: Finish | None) -> bool:
        """Whether the last token is an end token that is not part of the text."""
        return self._ends_by_token(finish) and not self.request.params.include_stop_str_in_output

    def _ends_by_token(self, finish: Finish | None) -> bool:
        """Whether the last token is an end token."""
        if finish is None or finish.reason != "stop" or not self._token_ids:
            return False
        return self._token_ids[-1] in self.request.end_ids and not self._has_stop_string

    def _add_text(self, piece: str) -> None:
        if self._stop is not None:
            enough = len(self._token_ids) >= self.request.params.min_tokens
            piece = self._stop.push(piece, may_stop=enough)
        self._keep(piece)

    def _keep(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._pending_text.append(piece)

    def _complete(self, finish: Finish) -> None:
        """Build the completion, then notify. An error before the notification can still be reported
        by `fail`."""
        if self._text is not None:
            if not self._is_eager:
                ids = self._token_ids[: -1 if self._hides_last(finish) else None]
                self._add_text(self._text.push(ids))
            self._add_text(self._text.finish())
            if self._stop is not None:
                self._keep(self._stop.finish())
        completion = self._completion(finish)
        self._cached_tokens = completion.usage.cached_tokens
        self._has_ended = True
        if self.streams:
            self._send_chunk(completion)
        else:
            self._notify(completion)

    def _completion(self, finish: Finish) -> Completion:
        wanted = self.request.params.logprobs
        prompt_logprobs, prompt_ranks, prompt_top_logprobs = self._of_prompt(finish)
        digest, usage = self.request.digest, finish.usage
        if self._has_stop_string:  # more tokens may have been sampled in the last step
            usage = usage.with_answer(len(self._token_ids))
        if (prediction := self.request.prediction) is not None:
            num_accepted = count_matched(prediction, self._token_ids)
            usage = replace(
                usage,
                accepted_prediction_tokens=num_accepted,
                rejected_prediction_tokens=len(prediction) - num_accepted,
            )
        return Completion(
            request_id=self.request.request_id,
            text="".join(self._pieces),
            token_ids=list(self._token_ids),
            finish_reason=self._reason(finish),
            stop_reason=self._stop_reason(finish),
            usage=usage,
            metrics=finish.metrics,
            miss=finish.miss,
            logprobs=None if wanted is None else list(self._logprobs),
            top_logprobs=(
                list(self._top_logprobs) if self.request.params.has_top_logprobs else None
            ),
            cumulative_logprob=None if wanted is None else math.fsum(self._logprobs),
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
            prompt_ranks=prompt_ranks,
            prompt=self._prompt,
            digest=None if digest is None else digest.hexdigest(len(self._token_ids)),
            weight_epochs=tuple(  # beams may end earlier, and stop strings
                epoch._replace(end=min(epoch.end, len(self._token_ids)))
                for epoch in finish.weight_epochs
                if epoch.start < len(self._token_ids)
            ),
        )

    def _of_prompt(
        self, finish: Finish
    ) -> tuple[
        list[float | None] | None, list[int | None] | None, list[dict[int, float] | None] | None
    ]:
        """Returns the logprobs, ranks and top logprobs of the prompt, each None if not requested.
        They have one entry per token, None up to `logprob_start_len` and for those that were not
        reached."""
        wanted = self.request.params.prompt_logprobs
        if wanted is None:
            return None, None, None
        scores = finish.prompt_scores
        num_prompt = self.request.num_prompt
        first = [None] * min(num_prompt, 1 + self.request.params.logprob_start_len)
        rest = [None] * (num_prompt - len(first) - len(scores))
        logprobs = [*first, *(score.logprob for score in scores), *rest]
        ranks = [*first, *(score.rank for score in scores), *rest]
        if not wanted:
            return logprobs, ranks, None
        return logprobs, ranks, [*first, *(dict(score.top_logprobs) for score in scores), *rest]

    def _reason(self, finish: Finish) -> FinishReason:
        """Returns the finish reason: "stop" for a stop string in the last text, even if the length
        ended the request."""
        if self._has_stop_string and finish.reason == "length":
            return "stop"
        return cast(FinishReason, finish.reason)  # a request with an error has no Completion

    def _stop_reason(self, finish: Finish) -> str | int | None:
        if self._stop is not None and self._stop.matched_stop is not None:
            return self._stop.matched_stop
        if not self._ends_by_token(finish):
            return None
        last = self._token_ids[-1]
        return last if last in tuple(self.request.params.stop_token_ids) else None

    def _send_chunk(self, completion: Completion | None = None) -> None:
        if not self._pending_text and completion is None and self._text is not None:
            return
        start, self._num_sent = self._num_sent, len(self._token_ids)
        text = "".join(self._pending_text)
        self._pending_text.clear()
        wanted = self.request.params.logprobs
        self._notify(
            Chunk(
                self.request.request_id,
                text,
                self._token_ids[start:],
                completion,
                None if wanted is None else self._logprobs[start:],
                self._top_logprobs[start:] if self.request.params.has_top_logprobs else None,
                self._cached_tokens,
            )
        )
