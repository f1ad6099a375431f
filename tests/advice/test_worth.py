"""What caching saved, by tenant and session, in tokens, seconds and money."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.advice.report import join_worth
from radixserve.advice.worth import MOST_OWNERS, Prices, WorthExtension
from radixserve.output import Finish, Metrics, Usage
from radixserve.request import Request

PARTS = {"schedule_s": 1.0, "prepare_s": 0.0, "forward_s": 8.0, "sample_s": 0.5, "commit_s": 0.5}


class Counted:
    """An extension to which requests are told; a computed token costs 2 ms."""

    def __init__(self) -> None:
        self.extension = WorthExtension(lambda: (0.2, 100), lambda: PARTS)
        self.number = 0

    def end(self, prompt: int, cached: int, namespace: str = "", session: str = "") -> None:
        self.number += 1
        params = SamplingParams(max_tokens=4, namespace=namespace)
        ids = np.arange(prompt, dtype=np.int32)
        request = Request(
            f"{self.number}", ids, params, 0, frozenset(), max_len=prompt + 4, session=session
        )
        usage = Usage(prompt, cached, prompt - cached, 4)
        finish = Finish("length", usage, Metrics(0.0, 0.1, 0.2), None)
        self.extension.on_finish(request, [1, 2, 3, 4], finish, float(self.number))


def test_sums_by_tenant_and_session() -> None:
    counted = Counted()
    counted.end(100, 0, "ann", "a")
    counted.end(200, 150, "ann/salt", "a")
    counted.end(300, 50, "bob")
    worth = counted.extension.worth()
    assert (worth["requests"], worth["prompt_tokens"], worth["cached_tokens"]) == (3, 600, 200)
    assert worth["computed_tokens"] == 400
    assert worth["token_s"] == pytest.approx(0.002)
    assert worth["saved_s"] == pytest.approx(0.4)
    assert worth["tenants"]["ann"]["saved_s"] == pytest.approx(0.3)
    assert worth["tenants"]["bob"]["computed_tokens"] == 250
    (session,) = worth["sessions"]
    assert (session["tenant"], session["session"], session["requests"]) == ("ann", "a", 2)
    assert [one["saved_s"] for one in worth["last"]] == pytest.approx([0.0, 0.3, 0.1])
    assert worth["parts"]["forward"] == pytest.approx(0.8)
    of_bob = counted.extension.worth("bob")
    assert (of_bob["requests"], of_bob["sessions"]) == (1, [])
    assert list(of_bob["tenants"]) == ["bob"]
    assert [one["tenant"] for one in of_bob["last"]] == ["bob"]
    assert counted.extension.worth("eve")["requests"] == 0
    joined = join_worth([worth, of_bob])
    assert joined["requests"] == 4
    assert joined["tenants"]["bob"]["requests"] == 2


def test_memory_is_bounded() -> None:
    counted = Counted()
    for number in range(MOST_OWNERS + 50):
        counted.end(10, 5, f"t{number}", f"s{number}")
    worth = counted.extension.worth()
    assert len(worth["tenants"]) == len(worth["sessions"]) == MOST_OWNERS
    assert worth["requests"] == MOST_OWNERS + 50
    assert len(worth["last"]) < 100


def test_nothing_is_saved_before_a_cost_is_known() -> None:
    extension = WorthExtension(lambda: (0.0, 0), lambda: PARTS)
    assert extension.worth()["token_s"] == extension.stats()["saved_s"] == 0.0


def test_a_price_list() -> None:
    prices = Prices.read("prices", "input=3, cached_input=0.3,currency=EUR")
    assert prices == (3.0, 0.3, "EUR")
    assert prices.saved(1_000_000) == pytest.approx(2.7)
    assert Prices.read("prices", "input=2") == (2.0, 0.0, "USD")
    for wrong in ("", "3", "input=x", "input=-1", "cached_input=1", "input=1,output=2", "input="):
        with pytest.raises(InvalidRequest, match="prices"):
            Prices.read("prices", wrong)


def test_an_engine_counts_what_it_saved() -> None:
    with Runtime("random:tiny-llama", device="cpu", num_pages=2000, advice=True) as runtime:
        prompt = np.random.default_rng(0).integers(3, 288, 200).tolist()
        for _ in range(3):
            runtime.generate(prompt, SamplingParams(max_tokens=2, namespace="ann"))
        worth, stats = runtime.cache_worth("ann"), runtime.cache_stats()
        assert worth is not None
        assert worth["cached_tokens"] == stats["reused_tokens"] == 2 * 199
        assert worth["saved_s"] > 0
        assert sum(worth["parts"].values()) == pytest.approx(1.0)
        assert stats["worth"]["saved_s"] == pytest.approx(worth["saved_s"])
    with Runtime("random:tiny-llama", device="cpu", num_pages=200, advice=False) as plain:
        assert plain.cache_worth() is None
