"""Requests that are scored instead of continued."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake import Driver, fake_score, prefix_hashes, random_prompt

PROMPT = list(range(2, 30))


def add_score(driver: Driver, name: str, prompt: list[int], candidate: list[int]) -> list[float]:
    """Queue it; returns the scores to come."""
    driver.add(name, prompt + candidate[:-1], logprob_targets=candidate, max_len=100)
    hashes = prefix_hashes(prompt + candidate)
    at = len(prompt) - 1
    return [fake_score(hashes[at + i], token) for i, token in enumerate(candidate)]


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_candidates_share_the_prompt(kind: str, page_size: int, chunked_prefill_size: int) -> None:
    driver = Driver(
        400 // page_size, page_size, chunked_prefill_size=chunked_prefill_size, kind=kind
    )
    candidates = [[40 + i, *range(3, 3 + 2 * i)] for i in range(5)]
    expected = {str(i): add_score(driver, str(i), PROMPT, c) for i, c in enumerate(candidates)}
    driver.run()
    assert driver.logprobs == expected
    assert {finish.reason for finish in driver.finished.values()} == {"stop"}
    if page_size == 1:  # the prompt's last token is computed by each: something is read behind it
        computed = [driver.finished[str(i)].usage.computed_tokens for i in range(5)]
        assert computed[0] == len(PROMPT)
        assert computed[1:] == [len(c) for c in candidates[1:]]
    driver.drain()


@pytest.mark.parametrize("samples", [False, True])
def test_scores_take_half_of_a_step_of_others(samples: bool) -> None:
    """Their logits are work, too. Alone they have the whole step."""
    driver = Driver(400, chunked_prefill_size=8)
    driver.add("other", PROMPT, max_tokens=60, ignore_eos=True)
    while not driver.output("other"):
        driver.step()
    targets = list(range(31, 60))
    driver.add("scored", [5, *targets], logprob_targets=targets, samples=samples, max_tokens=1)
    num_prefills = []
    while "scored" not in driver.finished:
        schedule = driver.step()
        assert schedule is not None
        num_prefills.append(schedule.num_prefill_tokens)
        assert schedule.num_decode_tokens >= 1
    assert max(num_prefills) == 4
    driver.run()
    driver.add("alone", [6, *targets], logprob_targets=targets, samples=samples, max_tokens=1)
    schedule = driver.step()
    assert schedule is not None
    assert schedule.num_prefill_tokens == 8
    driver.run()
    driver.drain()


def test_what_was_scored_is_not_scored_again() -> None:
    driver = Driver(400)
    first = add_score(driver, "first", PROMPT, [40, 41, 42])
    driver.run()
    again = add_score(driver, "again", PROMPT, [40, 41, 42])
    driver.run()
    assert driver.logprobs == {"first": first, "again": again}
    assert driver.finished["again"].usage.computed_tokens == 1  # the last token's score is new
    driver.drain()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_storm(seed: int, page_size: int) -> None:
    """Among others, in a pool in which few fit: nothing is scored twice or lost."""
    rng = random.Random(seed)
    driver = Driver(160 // page_size, page_size, chunked_prefill_size=7, max_running_requests=5)
    known: list[list[int]] = []
    expected: dict[str, list[float]] = {}
    for number in range(40):
        tokens = [*random_prompt(rng, known, 60), 7]
        known.append(tokens)
        name = str(number)
        if rng.random() < 0.6:
            cut = rng.randint(1, len(tokens) - 1)
            expected[name] = add_score(driver, name, tokens[:cut], tokens[cut:])
        else:
            driver.add(name, tokens, max_len=100, max_tokens=rng.randint(1, 30))
        for _ in range(rng.randint(0, 6)):
            driver.step()
            driver.cache.check()
        if rng.random() < 0.1:
            driver.abort(name)
    driver.run()
    for name, scores in expected.items():
        if driver.finished[name].reason == "stop":
            assert driver.logprobs[name] == scores, name
    driver.drain()
