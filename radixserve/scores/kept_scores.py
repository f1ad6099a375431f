"""`KeptScores`: an extension of the scheduler that keeps log-probabilities beside cached tokens.

The log-probability of a token depends on the tokens before it alone, like its K/V. Those that a
request asked for are kept in the node of the token, and leave with it. A request that asks for
them again reads them: it computes from the first token on whose score is not known.
"""

from __future__ import annotations

from radixserve.cache import RadixCache
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.scheduler.extension import SchedulerExtension, SchedulerParts
from radixserve.scheduler.request_state import RequestState, TargetScores
from radixserve.scores.token_scores import TokenScores, read_scores, write_scores


class SharedScores(TargetScores):
    """Scores that other requests find in the cache once the tokens before them are committed."""

    __slots__ = ("num_kept",)

    def __init__(self) -> None:
        super().__init__()
        self.num_kept = 0  # of the leading targets: they are in the cache

    def num_shared(self, state: RequestState, producer: RequestState) -> int:
        """All tokens if the producer scores what `state` needs."""
        if not isinstance(producer.scores, SharedScores) or producer.is_scored:
            return 0
        request, other = state.request, producer.request
        is_enough = (
            other.score_start <= state.num_reusable
            and other.also_generate >= request.also_generate
            and request.num_top_logprobs in (0, other.num_top_logprobs)
        )
        return len(request.token_ids) if is_enough else 0


class KeptScores(SchedulerExtension):
    """Works on the tree of a `RadixCache` with reuse; does nothing beside another cache."""

    def __init__(self) -> None:
        self._cache: RadixCache | None = None
        self._num_kept = self._num_read = 0  # scores since the start

    def attach(self, parts: SchedulerParts) -> None:
        cache, self._parts = parts.cache, parts
        if isinstance(cache, RadixCache) and cache.sharing_enabled:
            self._cache = cache

    def on_arrival(self, state: RequestState) -> None:
        if self._cache is None or state.scores is None:
            return
        state.scores = SharedScores()
        if self._read(self._cache, state, state.scores):
            state.prefix_watch.close()
            state.watch_prefix(self._cache)
            state.cached_on_arrival = state.prefix_watch.cached_len

    def before_start(self, state: RequestState) -> None:
        if self._cache is None or state.scores is None or state.is_scored:
            return
        if self._read(self._cache, state, state.scores):
            self._parts.waiting.rewatch(state)

    def _read(self, cache: RadixCache, state: RequestState, scores: TargetScores) -> bool:
        """Note the scores of the next targets that the tree has. Returns whether it has any. A
        target that is not the prompt's next token is not looked for. O(prompt)."""
        request = state.request
        first = request.score_start + 1
        start = first + scores.num_scored
        end, node = cache.match(request.keyed_tokens(), request.namespace)
        if node is None or end <= start:
            return False
        end -= _num_other(state, start, end)
        num_before = scores.num_scored
        num_tops = request.num_top_logprobs
        for found in read_scores(
            node, start, end, with_ranks=request.also_generate, num_tops=num_tops
        ):
            scores.logprobs += found.logprobs.tolist()
            if request.also_generate:
                scores.ranks += found.ranks.tolist()
            if num_tops:
                pairs = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
                scores.tops += [tuple(zip(*pair, strict=True)) for pair in pairs]
        num_read = scores.num_scored - num_before
        self._num_read += num_read
        return num_read > 0

    def on_scored(self, state: RequestState) -> None:
        """Keep the scores of committed tokens that are not kept yet."""
        scores, sequence, request = state.scores, state.sequence, state.request
        if not isinstance(scores, SharedScores) or not isinstance(sequence, RadixSequence):
            return
        first, leaf = request.score_start + 1, sequence.last_node
        start, end = first + scores.num_kept, min(first + scores.num_scored, sequence.committed_len)
        if leaf.start < start and _num_values(leaf) < start - leaf.start:
            start = max(first, leaf.start)  # a leaf of less than a page was made anew
        end -= _num_other(state, start, end)
        if end <= start:  # nothing new, or other targets
            return
        new = slice(start - first, end - first)
        columns = scores.logprobs[new], scores.ranks[new], scores.tops[new]
        kept = TokenScores.of(*columns, request.num_top_logprobs)
        scores.num_kept = end - first
        self._write(sequence, start, kept)

    def on_end(self, state: RequestState) -> None:
        """Keep the log-probabilities of the answer's tokens, all but the last one's, and the score
        of the prompt's last token, which was committed after it was scored."""
        if state.scores is not None:
            self.on_scored(state)
        sequence, logprobs = state.sequence, state.output_logprobs
        if not logprobs or self._cache is None or not isinstance(sequence, RadixSequence):
            return
        start = len(state.request.token_ids)
        num_tokens = sequence.committed_len - start
        if num_tokens > 0:
            self._write(sequence, start, TokenScores.of(logprobs[:num_tokens], [], [], 0))

    def _write(self, sequence: RadixSequence, start: int, scores: TokenScores) -> None:
        if not sequence.is_stale:
            tokens = sequence.tokens[start : start + len(scores)]
            write_scores(sequence.last_node, start, scores, tokens)
            self._num_kept += len(scores)

    def stats(self) -> dict[str, int]:
        """kept_scores: log-probabilities that were kept in the tree since the start. read_scores:
        those that requests read there in place of computing them."""
        return {"kept_scores": self._num_kept, "read_scores": self._num_read}


def _num_values(node: Node) -> int:
    values = node.token_values
    return len(values) if isinstance(values, TokenScores) else 0


def _num_other(state: RequestState, start: int, end: int) -> int:
    """Returns how many targets, of those of the positions [start, end), follow the first one that
    is not the prompt's own token there."""
    request = state.request
    targets = request.logprob_targets
    assert targets is not None
    if end <= start:
        return 0
    first = request.score_start + 1
    differs = targets[start - first : end - first] != request.token_ids[start:end]
    return len(differs) - int(differs.argmax()) if differs.any() else 0
