"""`GrammarMatcher`: an answer's position in its grammar, and the tokens that may follow.

The state depends on the answer's tokens only: `sync` moves a matcher to any answer, by consuming
new tokens and rolling back removed ones. So preempted requests, replaced beams and discarded
samples need no bookkeeping elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray, IntBuffer
from radixserve.grammar.backend import TokenTable
from radixserve.grammar.bitmask_workers import BitmaskTasks, BitmaskWorkers

Bitmask = NDArray[np.int32]

_NONE: IntArray = np.empty(0, np.int32)


class CompiledGrammar:
    """A grammar for one vocabulary. Shared by any number of requests and threads."""

    __slots__ = ("_native", "jump_forward", "table")

    def __init__(self, native: Any, table: TokenTable, *, jump_forward: bool) -> None:
        """native: an `LLMatcher` at the start of an answer, which is only copied."""
        self._native = native
        self.table = table
        self.jump_forward = jump_forward

    def matcher(self, end_ids: frozenset[int]) -> GrammarMatcher:
        """Returns the matcher of a new answer. `end_ids`: tokens that end its request. Takes
        microseconds."""
        return GrammarMatcher(self, self.fresh(), end_ids)

    def fresh(self) -> Any:
        return self._native.deep_copy()


class GrammarMatcher:
    """One answer's state. One thread at a time.

    With `jump_forward`, where one text only can follow a token that was chosen, the tokens into
    which the grammar's compiler divides that text are the only ones allowed.

    error           why the answer cannot continue, such as a limit of the parser; None if it can
    is_complete     no token can follow: the answer is finished
    only_ends       whether the last bitmask allows end tokens only
    """

    __slots__ = (
        "_consumed",
        "_grammar",
        "_native",
        "_required",
        "end_ids",
        "error",
        "is_complete",
        "only_ends",
    )

    def __init__(self, grammar: CompiledGrammar, native: Any, end_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._native = native
        self._consumed = IntBuffer(_NONE)
        self._required: list[int] = []  # the only tokens allowed next, with jump_forward
        self.end_ids = end_ids
        self.error: str | None = None
        self.is_complete = False
        self.only_ends = False

    @property
    def num_words(self) -> int:
        """Number of int32 words of its bitmask row. The model's vocabulary may need fewer."""
        return self._grammar.table.num_words

    def fork(self) -> Self:
        """Returns the matcher of another answer with the same tokens so far. Takes
        microseconds."""
        native = self._native if self.error is not None else self._native.deep_copy()
        copy = type(self)(self._grammar, native, self.end_ids)
        copy._consumed, copy._required = IntBuffer(self._consumed.view()), self._required
        copy.error, copy.is_complete = self.error, self.is_complete
        return copy

    def sync(self, answer: IntArray) -> None:
        """Move to the position after the tokens `answer` [n]. O(tokens that changed), plus a
        comparison of n tokens."""
        before = self._consumed.view()
        same = min(len(before), len(answer))
        differs = np.flatnonzero(before[:same] != answer[:same])
        if len(differs):
            same = int(differs[0])
        if same < len(before):
            self._roll_back(before[:same])
        for token_id in answer[same:].tolist():
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """Append a token to the answer. A token that ends the request is ignored."""
        self._consumed.append(token_id)
        if token_id in self.end_ids or self.error is not None:
            return
        native, is_required = self._native, self._required[:1] == [token_id]
        self._required = self._required[1:] if is_required else []
        if self.is_complete or not native.consume_token(token_id):
            reason = native.get_error().partition("\n")[0]
            self.error = f"the grammar cannot be followed by token {token_id}: {reason}"
            return
        self.is_complete = native.is_stopped()
        if not self.is_complete and not self.end_ids and native.is_accepting():
            row = np.zeros(self.num_words, np.int32)
            self.compute(row)  # no later token could mark the end
            self.finish_row(row)
            self.is_complete = self.only_ends
        if self._grammar.jump_forward and not is_required and not self.is_complete:
            self._required = self._forced_ids()

    def forced_ids(self, answer: IntArray) -> list[int]:
        """Returns the tokens of the only text that can follow `answer`, without one after which the
        answer is complete or the request ends. Without jump_forward other tokens of the same text
        may be allowed, too."""
        self.sync(answer)
        if self.is_complete or self.error is not None:
            return []
        forced = self._required or self._forced_ids()
        return forced[:-1] if self._completes(forced) else forced

    def must_follow(self, token_ids: Sequence[int]) -> bool:
        """Whether no other tokens can follow, and the answer goes on after them: see `Matcher`."""
        required = self._required[: len(token_ids)]
        return list(token_ids) == required and not self._completes(required)

    def _completes(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer ends with these tokens. Takes microseconds."""
        after = self.fork()
        for token_id in token_ids:
            after.accept(token_id)
        return after.is_complete or after.error is not None

    def _forced_ids(self) -> list[int]:
        forced: list[int] = self._native.compute_ff_tokens()
        ends = [index for index, token_id in enumerate(forced) if token_id in self.end_ids]
        return forced[: ends[0]] if ends else forced

    def _roll_back(self, kept: IntArray) -> None:
        if self._grammar.jump_forward:  # what must follow depends on where it began
            self._native, self.error, self.is_complete = self._grammar.fresh(), None, False
            self._consumed, self._required = IntBuffer(_NONE), []
            for token_id in kept.tolist():
                self.accept(token_id)
            return
        count = self._consumed.size - len(kept)
        is_plain = self.error is None and not self._consumed_an_end(len(kept))
        if not (is_plain and self._native.rollback(count)):
            self._native = self._grammar.fresh()
            self._native.consume_tokens(kept.tolist())
        self._consumed = IntBuffer(kept)
        self.error = self._native.get_error() or None
        self.is_complete = self.error is None and self._native.is_stopped()

    def _consumed_an_end(self, first: int) -> bool:
        return any(token in self.end_ids for token in self._consumed.view(first).tolist())

    def compute(self, row: IntArray) -> None:
        """Let the parser fill a bitmask row, which may be longer than its part. Releases Python's
        lock."""
        if self._required:
            row.view(np.uint32)[self._required[0] // 32] = np.uint32(1 << self._required[0] % 32)
        elif self.error is None:
            self._native.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self.num_words)

    def finish_row(self, row: IntArray) -> None:
        """Set the request's end tokens in a computed row, and allow no token after an error."""
        native = self._native
        if self.error is None and native.is_error():
            reason = native.get_error().partition("\n")[0]
            self.error = f"the grammar cannot be followed: {reason}"
        if self.error is not None:
            row[:] = 0
            return
        if self._required:
            self.only_ends = False
            return
        words, end_id = row.view(np.uint32), self._grammar.table.end_id
        words[end_id // 32] &= ~np.uint32(1 << end_id % 32)
        may_end = self.is_complete or native.is_accepting()
        self.only_ends = may_end and not words.any()
        if may_end:
            for token_id in self.end_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)


class BitmaskFuture:
    """The bitmasks of the tokens that may follow some answers, while other threads compute
    them."""

    def __init__(
        self, matchers: Sequence[GrammarMatcher], answers: Sequence[IntArray], num_words: int
    ) -> None:
        """answers: the tokens of each answer, without placeholders. num_words: least int32 words
        per row, for the model's vocabulary. Takes 20 to 150 microseconds per row."""
        self.matchers = tuple(matchers)
        words = max((matcher.num_words for matcher in matchers), default=0)
        words = max(num_words, words)
        self._rows: Bitmask = np.zeros((len(matchers), words), np.int32)
        work = zip(self.matchers, answers, self._rows, strict=True)
        self._batch: BitmaskTasks = _workers().start(
            [partial(_compute, *arguments) for arguments in work]
        )

    def get(self) -> Bitmask:
        """Returns [n, words] int32: bit t % 32 of word t // 32 tells whether token t may be
        sampled. Waits for the threads."""
        slow = self._batch.finish()
        rows = self._rows
        if slow:
            rows = rows.copy()  # threads may still write into the original
            for index in slow:
                self.matchers[index].error = "the grammar cannot be followed: it takes too long"
        for matcher, row in zip(self.matchers, rows, strict=True):
            matcher.finish_row(row)
        return rows


def _compute(matcher: GrammarMatcher, answer: IntArray, row: IntArray) -> None:
    try:
        matcher.sync(answer)
        matcher.compute(row)
    except Exception as error:  # of this answer only
        matcher.error = f"the grammar cannot be followed: {error!r}"


@cache
def _workers() -> BitmaskWorkers:
    return BitmaskWorkers()


if hasattr(os, "register_at_fork"):  # a forked process does not have the threads
    os.register_at_fork(after_in_child=_workers.cache_clear)
