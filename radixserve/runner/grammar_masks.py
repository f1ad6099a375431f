"""What the grammars of a step's answers allow: bitmasks, made on the host while the step runs.

The sampler alone moves the matchers: before a row is sampled to the tokens that the answer
has, after it to the sampled token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.grammar.matcher import Bitmask, GrammarMatcher, PendingMasks
from radixserve.schedule import SampleOutput, SampleSpec
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_library import is_loaded


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Grammars and masks of the rows that have one."""

    rows: tuple[int, ...]  # [m] their indices among the step's sampled rows
    matchers: tuple[GrammarMatcher, ...]  # [m]
    bitmask: Bitmask  # [m, words] bit t % 32 of word t // 32: token t may be sampled

    def select(self, rows: Sequence[int]) -> GrammarMasks:
        """The masks of `rows`, which are renumbered 0, 1, 2 ..."""
        place = {row: at for at, row in enumerate(self.rows)}
        kept = [(at, place[row]) for at, row in enumerate(rows) if row in place]
        picked = [one for _, one in kept]
        matchers = tuple(self.matchers[one] for one in picked)
        return GrammarMasks(tuple(at for at, _ in kept), matchers, self.bitmask[picked])

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [S, V] with what may not be sampled at -inf; a copy."""
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
        """`cpu_ops.argmax` of logits [S, V] among what may be sampled; -1 where that is nothing."""
        return cpu_ops.argmax_allowed(logits, self.bitmask, self._mask_of(len(logits)))

    def sample(
        self, logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float64]
    ) -> tuple[list[int], int]:
        """`cpu_ops.sample` of logits [S, V] among what may be sampled."""
        mask_of = self._mask_of(len(logits))
        return cpu_ops.sample(logits, self.bitmask, mask_of, temperature, uniform)

    def _mask_of(self, num_rows: int) -> NDArray[np.int64]:
        """[S] the place of each row's mask, -1 for none."""
        mask_of = np.full(num_rows, -1, np.int64)
        mask_of[list(self.rows)] = range(len(self.rows))
        return mask_of

    def note_outputs(self, outputs: list[SampleOutput]) -> None:
        """Move the matchers to what was sampled; an answer that is at its end says so, one that
        cannot go on has an error. Beams, which sample later, stay where they are."""
        for row, matcher in zip(self.rows, self.matchers, strict=True):
            output = outputs[row]
            if matcher.error is not None:
                outputs[row] = SampleOutput(-1, None, (), matcher.error)
            elif output.error is None and output.candidates is None:
                matcher.accept(output.token_id)
                forced = tuple(matcher.force()) if matcher.jump_forward else ()
                done = matcher.is_complete
                outputs[row] = output._replace(is_complete=done, forced_ids=forced)


class StepMasks:
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
        self._pending = PendingMasks(matchers, answers, -(-vocab_size // 32))

    def get(self) -> GrammarMasks:
        """Wait for them."""
        bitmask = self._pending.get()
        words = bitmask.view(np.uint32)
        for at, (matcher, banned) in enumerate(
            zip(self._pending.matchers, self._banned, strict=True)
        ):
            if not matcher.only_ends:  # the grammar counts for more than min_tokens
                for token_id in banned:
                    words[at, token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return GrammarMasks(self._rows, self._pending.matchers, bitmask)


def begin_masks(specs: Sequence[SampleSpec], vocab_size: int) -> StepMasks | None:
    """Where all tokens are known. None where no row has a grammar."""
    if all(spec.matcher is None for spec in specs):
        return None
    return StepMasks(specs, vocab_size)
