"""Why a prompt found less in the cache than an earlier one had left there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime

import numpy as np
import pytest

from radixserve import Completion, InvalidRequest, Runtime, SamplingParams
from radixserve.cache.diagnosis import common_length, diagnose, is_time
from radixserve.text import chat_clocks
from radixserve.text.chat_clocks import clock_span

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXT = "The urllib module opens addresses, and what else does it do for a program?"


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=2_048) as runtime:
        yield runtime


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def ask(rt: Runtime, prompt: object) -> Completion:
    answer = rt.generate(prompt, FOUR, progress=False)  # type: ignore[call-overload]
    assert isinstance(answer, Completion)
    return answer


def test_a_prompt_that_goes_on_hits(rt: Runtime) -> None:
    first = ask(rt, TEXT)
    history = [*first.prompt_token_ids.tolist(), *first.token_ids]
    second = ask(rt, [*history, 7, 8, 9])
    diagnosis = second.diagnosis(first)
    assert diagnosis.reason == "hit"
    assert diagnosis.tokens_lost == 0
    assert diagnosis.reusable_tokens == diagnosis.cached_tokens == len(history) - 1
    assert diagnosis.shared_tokens == len(history)


def test_an_edit_names_its_place_and_both_texts(rt: Runtime) -> None:
    rt.flush_cache()
    first = ask(rt, TEXT)
    edited = TEXT.replace("what else", "nothing more")
    second = ask(rt, edited)
    diagnosis = second.diagnosis(first)
    size = first.usage.prompt_tokens
    both = [completion.prompt_token_ids.tolist() for completion in (first, second)]
    place = next(index for index in range(size) if both[0][index] != both[1][index])
    assert diagnosis.reason == "diverged"
    assert diagnosis.position == diagnosis.shared_tokens == place == second.usage.cached_tokens
    assert diagnosis.reusable_tokens == size + 3
    assert diagnosis.tokens_lost == min(size + 3, second.usage.prompt_tokens - 1) - place
    assert diagnosis.expected is not None
    assert diagnosis.found is not None
    start = rt.tokenizer.decode(both[0][:place])  # type: ignore[union-attr]
    assert (start + diagnosis.expected).startswith(TEXT[: len(start) + 20])
    assert (start + diagnosis.found).startswith(edited[: len(start) + 20])


def test_what_was_evicted_is_no_edit(rt: Runtime) -> None:
    rt.flush_cache()
    first = ask(rt, TEXT)
    history = [*first.prompt_token_ids.tolist(), *first.token_ids]
    for number in range(20):  # of 2,048 pages
        ask(rt, [10 + number, *range(100, 300)])
    second = ask(rt, [*history, 7])
    diagnosis = second.diagnosis(first)
    assert diagnosis.reason == "evicted"
    assert diagnosis.position == second.usage.cached_tokens < len(history) - 1
    assert diagnosis.tokens_lost == len(history) - 1 - second.usage.cached_tokens
    assert diagnosis.expected is diagnosis.found is None


def test_an_edit_behind_what_was_evicted_is_not_the_cause() -> None:
    prompt, previous = ids(1, 2, 3, 4, 5, 9, 9), ids(1, 2, 3, 4, 5, 6, 7, 8)
    diagnosis = diagnose(prompt, 2, "evicted", previous, 7)
    assert (diagnosis.reason, diagnosis.position, diagnosis.tokens_lost) == ("evicted", 2, 4)
    diagnosis = diagnose(prompt, 5, "diverged", previous, 7)
    assert (diagnosis.reason, diagnosis.position, diagnosis.tokens_lost) == ("diverged", 5, 1)
    diagnosis = diagnose(prompt, None, "", previous, 7)
    assert (diagnosis.reason, diagnosis.cached_tokens) == ("diverged", 5)


def test_whole_blocks_and_what_others_left() -> None:
    previous = ids(*range(40))
    prompt = ids(*range(41))
    assert diagnose(prompt, 32, "full", previous, 39).reason == "partial_page"
    assert diagnose(prompt, 0, "never_seen", previous, 39).reason == "never_seen"
    other = ids(*range(20), *range(90, 110))
    assert diagnose(other, 16, "never_seen", previous, 39).reason == "diverged"
    # Another conversation has left more than the edit has cut off.
    assert diagnose(other, 39, "full", previous, 39).reason == "hit"


def test_a_shorter_prompt_loses_only_what_it_has() -> None:
    previous = ids(*range(100))
    diagnosis = diagnose(ids(0, 1, 2, 50, 51), 3, "diverged", previous, 99)
    assert (diagnosis.tokens_lost, diagnosis.reusable_tokens) == (1, 99)
    assert diagnose(ids(0, 1, 2), 2, "full", previous, 99).reason == "hit"


def test_common_length() -> None:
    assert common_length(ids(), ids(1)) == 0
    assert common_length(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_length(ids(1, 2, 4), ids(1, 2, 3)) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Nov 2026", True),
        ("3:10 now", True),
        (" Tuesday, we", True),
        (" You are", False),
        ("", False),
    ],
)
def test_is_time(text: str, expected: bool) -> None:
    assert is_time(text) is expected


class Clock:
    """Stands for `datetime`; its time is set by tests."""

    time = datetime(2026, 3, 31, 23, 59)

    @classmethod
    def now(cls) -> datetime:
        return cls.time


def test_a_day_ends_in_a_conversation_of_messages(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the date that it began with; a new one has today's, and `lookup` tells the cause."""
    assert rt.tokenizer is not None
    template = "Today: {{ strftime_now('%d %B %Y') }}\n" + rt.tokenizer.chat_template
    monkeypatch.setattr(rt.tokenizer._tokenizer, "chat_template", template)
    monkeypatch.setattr(chat_clocks, "datetime", Clock)
    asked = [{"role": "user", "content": "What is a socket?"}]
    first = ask(rt, asked)
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    more = [*asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": "4"}]
    monkeypatch.setattr(Clock, "time", datetime(2026, 4, 1, 0, 1))
    missed = rt.lookup(asked)
    assert missed.reason == "date"
    assert missed.position < 12
    assert rt.lookup(more).cached_len >= known - 2
    assert ask(rt, more).usage.cached_tokens >= known - 2
    assert ask(rt, asked).usage.cached_tokens == missed.cached_len
    assert rt.lookup([{"role": "user", "content": "What is 5?"}]).reason == "diverged"


def test_where_a_prompt_has_the_date() -> None:
    def encode(day: int, month: int) -> list[int]:
        return [1, 2, 100 + day, 200 + month, 300, 4, 5]

    now = datetime(2026, 3, 31)
    found = clock_span(ids(*encode(31, 3)), now, lambda other: encode(other.day, other.month))
    assert found == (2, 4)
    assert clock_span(ids(1, 2), now, lambda _: [1, 2]) == (2, 2)


def test_completions_are_copied_pickled_and_compared(rt: Runtime) -> None:
    first = ask(rt, TEXT)
    for again in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), replace(first)):
        assert again == first
        assert again.prompt_token_ids.tolist() == first.prompt_token_ids.tolist()
    assert pickle.loads(pickle.dumps(first)).diagnosis(first).expected is None
    assert asdict(first)["text"] == first.text
    with pytest.raises(InvalidRequest, match="without its prompt"):
        replace(first, prompt=None).diagnosis(first)
