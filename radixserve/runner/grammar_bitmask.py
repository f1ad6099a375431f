"""Bitmasks of the tokens that a step's grammars allow, computed on the host during the step.

Only the sampler moves the matchers: to the answer's tokens before it samples a row, to the sampled
token afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.grammar.matcher import Bitmask, BitmaskFuture, GrammarMatcher
from radixserve.schedule import SampleOutput, SampleSpec
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_library import is_loaded


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """The grammars and masks of the rows with a grammar."""

    rows: tuple[int, ...]  # [m] their indices among the step's sampled rows
    matchers: tuple[GrammarMatcher, ...]  # [m]
    bitmask: Bitmask  # [m, words] bit t % 32 of word t // 32: token t may be sampled

    def select(self, rows: Sequence[int]) -> GrammarBitmask:
        """The masks of `rows`, which are renumbered 0, 1, 2 ..."""
        place = {row: new_row for new_row, row in enumerate(self.rows)}
        kept = [(new_row, place[row]) for new_row, row in enumerate(rows) if row in place]
        picked = [index for _, index in kept]
        matchers = tuple(self.matchers[index] for index in picked)
        return GrammarBitmask(tuple(new_row for new_row, _ in kept), matchers, self.bitmask[picked])

    def apply(self, logits: Tensor) -> Tensor:
        """Returns a copy of logits [S, V] with forbidden tokens at -inf."""
        if not self.rows:
            return logits
        if logits.is_cpu and is_loaded():
            return cpu_ops.copy_allowed(logits, self.bitmask, self._mask_of(len(logits)))
        bits = np.unpackbits(self.bitmask.view(np.uint8), axis=1, bitorder="little")
        is_allowed = torch.from_numpy(bits[:, : logits.shape[1]]).to(logits.device).bool()
        index = torch.tensor(self.rows, device=logits.device)
        some = logits.index_select(0, index).masked_fill(~is_allowed, -torch.inf)
        return some if len(some) == len(logits) else logits.index_copy(0, index, some)

    def best_tokens(self, logits: Tensor) -> tuple[list[int], int]:
        """`cpu_ops.argmax` of logits [S, V] among the allowed tokens; -1 without any."""
        return cpu_ops.argmax_allowed(logits, self.bitmask, self._mask_of(len(logits)))

    def sample(
        self, logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float64]
    ) -> tuple[list[int], int]:
        """`cpu_ops.sample` of logits [S, V] among the allowed tokens."""
        mask_of = self._mask_of(len(logits))
        return cpu_ops.sample(logits, self.bitmask, mask_of, temperature, uniform)

    def _mask_of(self, num_rows: int) -> NDArray[np.int64]:
        """[S] the place of each row's mask, -1 for none."""
        mask_of = np.full(num_rows, -1, np.int64)
        mask_of[list(self.rows)] = range(len(self.rows))
        return mask_of

    def note_outputs(self, outputs: list[SampleOutput]) -> None:
        """Advance the matchers by the sampled tokens. Outputs of complete answers have is_complete,
        those of answers that cannot continue an error. Beams are sampled later and do not move."""
        for row, matcher in zip(self.rows, self.matchers, strict=True):
            output = outputs[row]
            if matcher.error is not None:
                outputs[row] = SampleOutput(-1, None, (), matcher.error)
            elif output.error is None and output.candidates is None:
                matcher.accept(output.token_id)
                outputs[row] = output._replace(is_complete=matcher.is_complete)


class GrammarBitmaskFuture:
    """The masks of a step's sampled rows, begun before its forward pass or while it runs."""

    def __init__(
        self,
        specs: Sequence[SampleSpec],
        vocab_size: int,
        last_tokens: Mapping[int, int] | None = None,
    ) -> None:
        """specs: of the sampled rows, in their order. last_tokens: by row the last token of those
        that a step in flight sampled; a row that is missing there has no mask, as its request
        has ended."""
        rows: list[int] = []
        matchers: list[GrammarMatcher] = []
        answers: list[IntArray] = []
        for row, spec in enumerate(specs):
            if not isinstance(spec.matcher, GrammarMatcher):
                continue
            answer = spec.token_ids[spec.num_prompt :]
            if spec.num_placeholders:
                assert last_tokens is not None, "a step in flight samples the token before"
                if row not in last_tokens:
                    continue
                answer = np.append(answer, np.int32(last_tokens[row]))
            rows.append(row)
            matchers.append(spec.matcher)
            answers.append(answer)
        self._rows, self._banned = tuple(rows), [specs[row].banned_ids for row in rows]
        self._pending = BitmaskFuture(matchers, answers, -(-vocab_size // 32))

    def get(self) -> GrammarBitmask:
        """Wait for the masks."""
        bitmask = self._pending.get()
        words = bitmask.view(np.uint32)
        for mask_index, (matcher, banned) in enumerate(
            zip(self._pending.matchers, self._banned, strict=True)
        ):
            if not matcher.only_ends:  # the grammar counts for more than min_tokens
                for token_id in banned:
                    words[mask_index, token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return GrammarBitmask(self._rows, self._pending.matchers, bitmask)


def begin_bitmask(specs: Sequence[SampleSpec], vocab_size: int) -> GrammarBitmaskFuture | None:
    """The masks of rows whose tokens are all known; None if no row has a grammar."""
    if all(spec.matcher is None for spec in specs):
        return None
    return GrammarBitmaskFuture(specs, vocab_size)
