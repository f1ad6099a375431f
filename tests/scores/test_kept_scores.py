"""Scores in the tree: who computes them, who reads them, and when they leave."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake import Driver, fake_score, prefix_hashes, random_prompt

CONTEXT = list(range(2, 42))
CHOICES = [[50, 51, 52], [50, 61], [70, 71, 72, 73], [80]]


def add(driver: Driver, name: str, prompt: list[int], num_tops: int = 1, start: int = 0) -> None:
    """A request that scores its prompt after position `start`, and generates one token."""
    targets = prompt[1 + start :]
    driver.add(
        name, prompt, logprob_targets=targets, samples=True, max_tokens=1, max_len=150,
        prompt_logprobs=num_tops,
    )  # fmt: skip


def check(driver: Driver, name: str, num_tops: int = 1, start: int = 0) -> None:
    prompt, scores = driver.prompts[name], driver.finished[name].prompt_scores
    hashes = prefix_hashes(prompt)
    places = range(start, len(prompt) - 1)
    assert [one.logprob for one in scores] == [fake_score(hashes[at], prompt[at + 1])
                                               for at in places]  # fmt: skip
    assert [one.rank for one in scores] == [int(hashes[at]) % 9 + 1 for at in places]
    assert {len(one.top_logprobs) for one in scores} <= {num_tops}


def computed(driver: Driver) -> int:
    count = driver.scheduler.stats()["prefilled_tokens"]
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunked_prefill_size", [3, 16, 512])
def test_choices_over_one_context(page_size: int, chunked_prefill_size: int) -> None:
    """Together the context is computed once, and a second run computes each last token."""
    driver = Driver(800 // page_size, page_size, chunked_prefill_size=chunked_prefill_size)
    for number, choice in enumerate(CHOICES):
        add(driver, f"first {number}", CONTEXT + choice)
    driver.run()
    # The last token before a choice leaves what others have computed is computed for its logits.
    own = sum(map(len, CHOICES))
    shared = len({tuple(choice[:1]) for choice in CHOICES})  # the first two choices begin alike
    assert computed(driver) == len(CONTEXT) + own - (len(CHOICES) - shared) + len(CHOICES) - 1
    before = computed(driver)
    for number, choice in enumerate(CHOICES):
        add(driver, f"second {number}", CONTEXT + choice)
    driver.run()
    assert computed(driver) - before == len(CHOICES)
    for name in driver.finished:
        check(driver, name)
    driver.drain()


def test_one_after_the_other() -> None:
    driver = Driver(800)
    for number, choice in enumerate(CHOICES):
        add(driver, str(number), CONTEXT + choice)
        driver.run()
        check(driver, str(number))
    usages = [driver.finished[str(number)].usage.computed_tokens for number in range(4)]
    assert usages == [43, 2, 5, 2]
    driver.drain()


def test_what_was_not_asked_for_is_computed() -> None:
    """Other best tokens, and ranks where only log-probabilities are known."""
    driver = Driver(800)
    length = len(CONTEXT)
    driver.add("plain", CONTEXT[:-1], logprob_targets=CONTEXT[1:])
    driver.run()
    for name, num_tops, expected in (
        ("ranks", 0, length),
        ("two tops", 2, length),
        ("the same", 2, 1),
        ("no tops", 0, 1),
        ("five tops", 5, length),
    ):
        add(driver, name, CONTEXT, num_tops)
        driver.run()
        check(driver, name, num_tops)
        assert driver.finished[name].usage.computed_tokens == expected, name
    driver.add("again", CONTEXT[:-1], logprob_targets=CONTEXT[1:])
    driver.run()
    assert driver.finished["again"].usage.computed_tokens == 1
    assert driver.logprobs["again"] == driver.logprobs["plain"]
    driver.drain()


def test_only_what_is_asked_is_scored() -> None:
    driver = Driver(800)
    driver.serve("context", CONTEXT)
    add(driver, "scored", [*CONTEXT, 50, 51], start=len(CONTEXT) - 1)
    driver.run()
    check(driver, "scored", start=len(CONTEXT) - 1)
    assert driver.finished["scored"].usage.computed_tokens == 3
    add(driver, "all", [*CONTEXT, 50, 51])  # the context has no scores: it is computed
    driver.run()
    check(driver, "all")
    assert driver.finished["all"].usage.computed_tokens == len(CONTEXT) + 2
    driver.drain()


def test_targets_that_are_not_the_prompt_are_not_kept() -> None:
    driver = Driver(800)
    wrong = [*CONTEXT[1:20], 99, *CONTEXT[21:]]
    driver.add("other", CONTEXT[:-1], logprob_targets=wrong)
    driver.run()
    driver.add("own", CONTEXT[:-1], logprob_targets=CONTEXT[1:])
    driver.run()
    hashes = prefix_hashes(CONTEXT)
    own = [fake_score(hashes[at], token) for at, token in enumerate(CONTEXT[1:])]
    assert driver.logprobs["own"] == own
    driver.drain()


def test_they_leave_with_their_tokens() -> None:
    driver = Driver(800)
    add(driver, "before", CONTEXT)
    driver.run()
    driver.cache.evict(15)
    add(driver, "cut", CONTEXT)
    driver.run()
    check(driver, "cut")
    assert driver.finished["cut"].usage.computed_tokens == 16  # and the one before, for its logits
    driver.cache.reset()
    add(driver, "reset", CONTEXT)
    driver.run()
    assert driver.finished["reset"].usage.computed_tokens == len(CONTEXT)
    driver.drain()


def test_other_namespaces_do_not_read_them() -> None:
    driver = Driver(800)
    driver.add("a", CONTEXT[:-1], logprob_targets=CONTEXT[1:], namespace="a")  # type: ignore[arg-type]
    driver.run()
    driver.add("b", CONTEXT[:-1], logprob_targets=CONTEXT[1:], namespace="b")  # type: ignore[arg-type]
    driver.run()
    assert driver.finished["b"].usage.computed_tokens == len(CONTEXT) - 1
    driver.drain()


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_storms(page_size: int, seed: int) -> None:
    """Few prompts, asked again and again in a pool in which few fit: every score is right."""
    rng = random.Random(seed)
    driver = Driver(176 // page_size, page_size, chunked_prefill_size=7, max_running_requests=4)
    known: list[list[int]] = [CONTEXT[:30]]
    asked: dict[str, tuple[int, int]] = {}
    for number in range(60):
        tokens = random_prompt(rng, known, 60)
        known.append(tokens)
        name = str(number)
        kind = rng.random()
        if kind < 0.5 and len(tokens) > 2:
            asked[name] = rng.choice([0, 1, 1, 3]), rng.choice([0, 0, len(tokens) // 2])
            add(driver, name, tokens, *asked[name])
        elif kind < 0.7 and len(tokens) > 1:
            driver.add(name, tokens[:-1], logprob_targets=tokens[1:], max_len=150)
        else:
            driver.add(name, tokens, max_len=150, max_tokens=rng.randint(1, 30))
        for _ in range(rng.randint(0, 3)):
            driver.step()
            driver.cache.check()
            if rng.random() < 0.1:
                driver.cache.evict(rng.randint(1, 40))
        if rng.random() < 0.1:
            driver.abort(name)
    driver.run()
    for name, (num_tops, start) in asked.items():
        if driver.finished[name].reason != "abort":
            check(driver, name, num_tops, start)
    assert driver.scheduler.stats()["read_scores"] > 0
    driver.drain()
