"""Requests whose prompt is scored before they go on."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake import VOCAB, Driver, fake_score, prefix_hashes, random_prompt

PROMPT = list(range(2, 35))  # 33 tokens


def add(driver: Driver, name: str, prompt: list[int], num_top: int = 0, **params: int) -> None:
    targets = prompt[1:] or None
    more = {"logprob_targets": targets, "samples": targets is not None, "prompt_logprobs": num_top}
    driver.add(name, prompt, **more, **params)  # type: ignore[arg-type]


def check(driver: Driver, name: str, num_top: int = 0) -> None:
    """Every token of the prompt has its score, once, and the answer is the usual one."""
    prompt, finish = driver.prompts[name], driver.finished[name]
    hashes = prefix_hashes(prompt)
    scores = [one.logprob for one in finish.prompt_scores]
    expected = [fake_score(hashes[at], token) for at, token in enumerate(prompt[1:])]
    if finish.reason == "abort":
        assert scores == expected[: len(scores)]
        return
    assert scores == expected
    for at, one in enumerate(finish.prompt_scores):
        assert one.top_logprobs == ((hashes[at] % VOCAB, -1.0),) * num_top
    output = driver.output(name)
    assert output == driver.expected(name, len(output))


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("chunked_prefill_size", [1, 5, 64])
def test_cold_and_warm(kind: str, page_size: int, chunked_prefill_size: int) -> None:
    driver = Driver(
        400 // page_size, page_size, chunked_prefill_size=chunked_prefill_size, kind=kind
    )
    for name in ("cold", "warm"):
        add(driver, name, PROMPT, 2, max_tokens=5, ignore_eos=True)
        driver.run()
        check(driver, name, 2)
        usage = driver.finished[name].usage
        num_read = len(PROMPT) - 1 if name == "warm" and kind == "radix" else 0
        assert (usage.cached_tokens, usage.computed_tokens) == (num_read, len(PROMPT) - num_read)
    held = driver.cache.stats()["pages_tree"]
    add(driver, "again", PROMPT, max_tokens=5, ignore_eos=True)
    driver.run()
    assert driver.cache.stats()["pages_tree"] == held  # what was computed twice is kept once
    driver.add("plain", PROMPT, max_tokens=2, ignore_eos=True)
    driver.run()
    assert driver.finished["plain"].usage.cached_tokens == len(PROMPT) - (
        1 if kind == "radix" else len(PROMPT) % page_size or page_size
    )
    assert not driver.finished["plain"].prompt_scores
    driver.drain()


def test_a_prompt_of_one_token() -> None:
    driver = Driver(50)
    add(driver, "a", [7], max_tokens=4, ignore_eos=True)
    driver.run()
    check(driver, "a")
    driver.drain()


def test_samples_share_the_prompt_that_the_first_one_scores() -> None:
    driver = Driver(400, 2, chunked_prefill_size=7)
    add(driver, "0", PROMPT, 1, max_tokens=5, ignore_eos=True)
    for seed in range(1, 4):
        driver.add(str(seed), PROMPT, seed=seed, max_tokens=5, ignore_eos=True)
    driver.run()
    check(driver, "0", 1)
    for name in "123":
        assert driver.output(name) == driver.expected(name, 5)
    assert driver.scheduler.stats()["prefilled_tokens"] == len(PROMPT) + 3
    driver.drain()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_storms(page_size: int) -> None:
    assert sum(storm(seed, page_size) for seed in range(5)) > 2


def storm(seed: int, page_size: int) -> int:
    """Among others, in a pool in which few fit: nothing is scored twice or lost.

    Returns how many were preempted.
    """
    rng = random.Random(seed)
    driver = Driver(112 // page_size, page_size, chunked_prefill_size=7, max_running_requests=5)
    known: list[list[int]] = []
    names: list[str] = []
    for number in range(40):
        tokens = random_prompt(rng, known, 60)
        known.append(tokens)
        name = str(number)
        params = {"max_tokens": rng.randint(1, 30), "priority": rng.choice([0, 0, 1])}
        if rng.random() < 0.6:
            add(driver, name, tokens, max_len=100, **params)
            names.append(name)
        else:
            driver.add(name, tokens, max_len=100, **params)
        for _ in range(rng.randint(0, 3)):
            driver.step()
            driver.cache.check()
            if rng.random() < 0.05:
                driver.cache.evict(20)
        if rng.random() < 0.1:
            driver.abort(name)
    driver.run()
    for name in names:
        check(driver, name)
        usage = driver.finished[name].usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    driver.drain()
    return driver.scheduler.stats()["preemptions"]
