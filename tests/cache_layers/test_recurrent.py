"""Recurrent states: where checkpoints are taken, when they are reused, and their owners."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.cache import OutOfPages, RadixCache
from radixserve.cache_layers import RecurrentLayers
from radixserve.cache_layers.checkpoint_order import CheckpointSpacing
from radixserve.cache_layers.recurrent import MESSAGE
from radixserve.cache_layers.recurrent import PROMPT as TURN

PROMPT = list(range(100, 160))


def make(
    num_states: int = 20, interval: int = 16, page_size: int = 1, **options: Any
) -> RadixCache:
    layers = RecurrentLayers(num_states, interval)
    return RadixCache(600, page_size, layers=layers, **options)


def compute(cache: RadixCache, seq: Any, tokens: list[int]) -> list[int]:
    """Extend, take checkpoints, commit; the lengths of those taken."""
    start = seq.length
    seq.extend(tokens)
    taken = seq.take_checkpoints(start)
    cache.layers.checkpoints.pool.take_copies()
    seq.commit(seq.length)
    cache.check()
    return [length for length, _ in taken]


def serve(cache: RadixCache, tokens: list[int], answer: list[int] | None = None) -> tuple[int, Any]:
    """Compute a prompt and its answer; what was reused, and the lengths of checkpoints taken."""
    with cache.acquire(tokens) as seq:
        reused = seq.cached_len
        taken = compute(cache, seq, tokens[reused:])
        for token in answer or ():
            taken += compute(cache, seq, [token])
    cache.check()
    return reused, taken


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_checkpoints_are_taken_at_intervals_and_before_the_end(page_size: int) -> None:
    cache = make(page_size=page_size)
    assert serve(cache, PROMPT) == (0, [16, 32, 48, 52, 59])
    assert cache.lookup(PROMPT)[:5] == (59, "full", 59, None, None)
    assert serve(cache, PROMPT) == (59, [])
    assert serve(cache, [*PROMPT, 1, 2]) == (60, [61])  # where the sequence before ended


def test_a_branch_gets_a_checkpoint_when_it_is_seen_again() -> None:
    cache = make(interval=1000)
    serve(cache, PROMPT)
    second, third = [*PROMPT[:30], 1, 2, 3], [*PROMPT[:30], 4, 5]
    answer = cache.lookup(second)
    assert (answer.cached_len, answer.reason, answer.position) == (0, "no_checkpoint", 30)
    assert serve(cache, second) == (0, [25, 30, 32])
    assert cache.lookup(third)[:3] == (30, "diverged", 30)
    assert serve(cache, third) == (30, [31])


def test_an_answer_is_continued_from_its_end() -> None:
    cache = make()
    answer = [1, 2, 3, 4, 5, 6]
    serve(cache, PROMPT, answer)
    assert serve(cache, [*PROMPT, *answer, 9, 9]) == (66, [67])


def begin(cache: RadixCache, tokens: list[int]) -> Any:
    seq = cache.acquire(tokens)
    compute(cache, seq, tokens[seq.cached_len :])
    return seq


def step_ahead(cache: RadixCache, seq: Any) -> tuple[int, int]:
    """The next step is planned before the token of this one is known."""
    seq.append_placeholders(1)
    seq.take_checkpoints(seq.length - 1)
    states: tuple[int, int] = seq.step_states(is_ahead=True)
    cache.check()
    return states


def test_an_end_that_a_step_ahead_has_passed() -> None:
    """Steps ahead read one state and write another: the one at the end is kept."""
    cache = make()
    seq = begin(cache, PROMPT)
    assert seq.step_states(is_ahead=False) == (seq.state_id, seq.state_id)
    first, second = step_ahead(cache, seq)
    assert first != second == seq.state_id
    seq.append_placeholders(1)
    assert seq.step_states(is_ahead=True) == (second, first)
    seq.commit_next(1)  # the first step drew it, the second computed it
    cache.check()
    seq.release()  # what the second one drew ends it
    cache.check()
    assert cache.lookup([*PROMPT, 1, 2, 3]).cached_len == 61
    again = cache.acquire([*PROMPT, 1, 2, 3])
    again.extend([2, 3])
    assert [source for source, _ in cache.layers.checkpoints.pool.take_copies()] == [second]


def test_the_state_before_a_step_ahead_is_given_up_last() -> None:
    """To sequences, after all checkpoints; then a step ahead writes the state that it reads."""
    cache = make(num_states=4)
    seqs = [begin(cache, [first, *PROMPT]) for first in range(2)]
    states = [step_ahead(cache, seq) for seq in seqs]
    assert sorted(sum(states, ())) == [0, 1, 2, 3]
    others = [cache.acquire([first]) for first in (7, 8)]
    for other, (read, _) in zip(others, states, strict=True):
        other.extend([7])
        assert other.state_id == read
        cache.check()
    with pytest.raises(OutOfPages, match="all 4 recurrent states"):
        cache.acquire([9]).extend([9])
    for seq in seqs:
        seq.commit_next(1)
        assert step_ahead(cache, seq) == (seq.state_id, seq.state_id)
    for seq in seqs:
        seq.release()
        cache.check()
    assert cache.lookup([0, *PROMPT, 1, 2]).cached_len == 0


def test_a_wanted_checkpoint_is_taken() -> None:
    cache = make(interval=1000)
    seq = cache.acquire(PROMPT)
    seq.want_checkpoint(21)
    assert compute(cache, seq, PROMPT) == [21, 52, 59]


def test_a_sequence_begins_with_a_copy() -> None:
    cache = make()
    serve(cache, PROMPT)
    seq = cache.acquire(PROMPT)
    assert seq.state_id == -1
    seq.extend([PROMPT[-1]])
    ((source, target),) = cache.layers.checkpoints.pool.take_copies()
    assert target == seq.state_id != source
    assert cache.layers.checkpoints.pool.take_copies() == []
    fork = cache.acquire([7])
    fork.extend([7])
    assert cache.layers.checkpoints.pool.take_copies() == []  # it begins with zeros


def test_a_fork_has_a_state_of_its_own() -> None:
    cache = make()
    seq = cache.acquire(PROMPT)
    compute(cache, seq, PROMPT)
    fork: Any = seq.fork()
    assert cache.layers.checkpoints.pool.take_copies() == [(seq.state_id, fork.state_id)]
    assert fork.length == 60
    compute(cache, fork, [1])
    cache.check()


def test_truncate_goes_back_to_a_checkpoint() -> None:
    cache = make()
    seq = cache.acquire(PROMPT)
    compute(cache, seq, PROMPT)
    seq.truncate(40)
    assert seq.length == seq.committed_len == 32
    assert compute(cache, seq, PROMPT[32:41]) == []
    cache.check()


def test_what_saves_the_fewest_tokens_is_evicted() -> None:
    """Of several prompts alike the oldest, and of each first the states near others."""
    cache = make(num_states=4, interval=1000)
    for first in range(5):
        serve(cache, [first, *PROMPT])
    lengths = [cache.lookup([first, *PROMPT]).cached_len for first in range(5)]
    assert lengths[0] == 0
    assert lengths[-1] >= 53
    assert sum(length > 0 for length in lengths) >= 2
    assert cache.lookup([0, *PROMPT])[:3] == (0, "no_checkpoint", 60)
    assert cache.lookup([0, *PROMPT]).missing_state_tokens == 60


def test_a_prefix_in_use_outlives_newer_states() -> None:
    cache = make(num_states=6, interval=1000)
    head = list(range(1000, 1040))
    serve(cache, [*head, 1, 2])
    for turn in range(20):
        serve(cache, [turn, *range(300, 340)])  # never again
        assert cache.lookup([*head, 50 + turn, 3]).cached_len >= 34
        serve(cache, [*head, 50 + turn, 3])


def test_more_conversations_than_states() -> None:
    """Some conversations keep their states. Evicted states count as used when their conversation
    returns: otherwise the ends of all conversations would appear to be useless."""
    num_states, num_conversations, num_turns = 8, 10, 20
    cache = RadixCache(20_000, layers=RecurrentLayers(num_states, 64))
    system = list(range(1000, 1100))
    history = [[*system, 2000 + number] for number in range(num_conversations)]
    ideal = reused = 0
    for turn in range(num_turns):
        for number, tokens in enumerate(history):
            if turn >= 10:
                ideal += len(tokens)
            tokens += [3000 + 50 * turn + number, *range(4000, 4030)]
            cached, _ = serve(cache, tokens, [5000 + turn] * 2)
            tokens += [5000 + turn] * 2
            if turn >= 10:
                reused += cached
    assert reused >= 0.6 * ideal


def test_a_checkpoint_near_others_is_not_worth_another_ones_room() -> None:
    cache = make(num_states=3, interval=1000)
    serve(cache, PROMPT)
    cache.lookup(PROMPT)
    seq = cache.acquire(PROMPT)
    seq.extend([PROMPT[-1]])
    assert cache.lookup(PROMPT).cached_len == 59
    more = cache.acquire([*PROMPT[:40], 1, 2])
    more.extend([*PROMPT[:40], 1, 2])
    more.want_checkpoint(41)
    before = cache.stats()["evicted_checkpoints"]
    taken = [length for length, _ in more.take_checkpoints(0)]
    assert 41 not in taken or cache.stats()["evicted_checkpoints"] > before
    cache.check()


def test_spacing_follows_the_memory_of_a_state() -> None:
    large, small = CheckpointSpacing(None, 3168), CheckpointSpacing(None, 10)
    assert (large.interval, small.interval) == (4096, 64)
    dense = [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280]
    assert large.lengths(0, 1300) == dense
    assert large.lengths(0, 1 << 20)[-1] - large.lengths(0, 1 << 20)[-2] == 8192
    assert small.lengths(0, 1 << 12) == list(range(64, 4097, 64))
    for spacing in (large, small, CheckpointSpacing(48)):
        whole = spacing.lengths(0, 5000)
        parts = [spacing.lengths(cut, min(cut + 77, 5000)) for cut in range(0, 5000, 77)]
        assert [length for part in parts for length in part] == whole


def test_ends_of_messages_get_checkpoints_as_far_as_they_lie_apart() -> None:
    cache = make(num_states=40, interval=1000)
    prompt = list(range(500))
    seq = cache.acquire(prompt)
    for length in (100, 110, 300, 490):
        seq.want_checkpoint(length, MESSAGE)
    seq.want_checkpoint(20, TURN)
    seq.want_checkpoint(495, TURN)  # so that none is taken 8 tokens before the end
    assert compute(cache, seq, prompt) == [20, 300, 490, 495, 499]


def test_what_loses_its_pages_loses_its_states() -> None:
    cache = make()
    serve(cache, PROMPT)
    cache.evict(20)
    assert cache.lookup(PROMPT).cached_len == 32
    cache.check()
    cache.evict(1000)
    stats = cache.stats()
    assert (stats["states_free"], stats["states_tree"]) == (20, 0)


def test_running_sequences_may_use_every_state() -> None:
    cache = make(num_states=2)
    first, second, third = (cache.acquire([n, *PROMPT]) for n in range(3))
    assert compute(cache, first, [0, *PROMPT]) == [16]
    compute(cache, second, [1, *PROMPT])
    length, free = third.length, cache.stats()["pages_free"]
    with pytest.raises(OutOfPages, match="all 2 recurrent states"):
        third.extend([2])
    assert (third.length, cache.stats()["pages_free"]) == (length, free)
    first.release()
    again = cache.acquire([0, *PROMPT, 5])
    assert again.cached_len == 61
    compute(cache, again, [5])  # takes the checkpoint itself
    assert cache.layers.checkpoints.pool.take_copies() == []
    cache.check()


def test_nothing_is_kept_without_reuse_or_after_a_reset() -> None:
    cache = make(reuse=False)
    assert serve(cache, PROMPT) == (0, [])
    cache = make()
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT)
    seq.take_checkpoints(0)
    cache.reset()
    seq.commit(60)
    seq.release()
    assert cache.stats()["states_free"] == 20
    cache.check()
