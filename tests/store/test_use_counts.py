"""`ReturnRate`: what is assumed at the start, what is counted, what is forgotten."""

from radixserve.store import ReturnRate


def test_a_little_is_assumed_and_then_counts_decide() -> None:
    returns = ReturnRate(window=100_000)
    assert returns.share(0, 0) == 0.005
    assert returns.share(98_000, 0) == 0.0001
    assert 0.49 < returns.share(98_000, 49_000) < 0.51
    assert returns.share(98_000, 10**9) == 1.0


def test_what_was_evicted_long_ago_is_forgotten() -> None:
    returns = ReturnRate(window=10_000)
    evicted, returned = 20_000, 20_000  # all came back
    assert returns.share(evicted, returned) > 0.9
    shares = []
    for _ in range(8):  # nothing comes back any more
        evicted += 10_000
        shares.append(returns.share(evicted, returned))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.01
