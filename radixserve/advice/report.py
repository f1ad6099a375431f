"""The advice in a sentence; the advice of several engines, and what they saved, as one."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.config import format_bytes
from radixserve.reports import CacheAdvice, CacheWorth, CurvePoint, RequestWorth, Worth


def advice_line(advice: CacheAdvice) -> str:
    """The advice in a sentence."""
    computed = advice["computed"]
    total = sum(computed.values())
    if not total:
        return "no prompt has been computed yet"
    pool, enough = advice["pool"], advice["enough"]
    now = 100 * pool["hit_rate"]
    if enough["tokens"] > pool["tokens"]:
        more = format_bytes(enough["bytes"] - pool["bytes"])
        text = f"{more} more would lift hits from {now:.0f} to {100 * enough['hit_rate']:.0f} %"
    else:
        room = format_bytes(enough["bytes"])
        text = f"{room} of K/V are enough for this traffic, with hits of {now:.0f} %"
    if evicted := advice["evicted_tokens"]:
        share = 100 * advice["regretted_tokens"] / evicted
        text += f"; {share:.0f} % of evicted tokens were needed again within a minute"
    parts = (f"{100 * count / total:.0f} % {name}" for name, count in computed.items() if count)
    return f"{text}; of the computed tokens {', '.join(parts)}"


def join_advice(each: Sequence[CacheAdvice]) -> CacheAdvice:
    """The advice of replicas as one: sizes and counts are added, rates weighted by their prompts'
    tokens. `next_gib` is of one GiB more on each."""
    first, *others = each
    if not others:
        return first
    weights = [one["prompt_tokens"] for one in each]

    def total(*names: str) -> dict[str, int]:
        return {name: sum(one[name] for one in each) for name in names}  # type: ignore[literal-required]

    def mean(rates: Sequence[float]) -> float:
        sums = sum(rate * weight for rate, weight in zip(rates, weights, strict=True))
        return sums / max(1, sum(weights))

    def point(points: Sequence[CurvePoint]) -> CurvePoint:
        return {
            "tokens": sum(one["tokens"] for one in points),
            "bytes": sum(one["bytes"] for one in points),
            "hit_rate": mean([one["hit_rate"] for one in points]),
        }

    computed = {name: sum(one["computed"][name] for one in each) for name in first["computed"]}
    counts = total("requests", "prompt_tokens", "reused_tokens")
    joined: CacheAdvice = {
        **first,
        **counts,  # type: ignore[typeddict-item]
        **total("evicted_tokens", "regretted_tokens"),
        "seconds": max(one["seconds"] for one in each),
        "pool": point([one["pool"] for one in each]),
        "enough": point([one["enough"] for one in each]),
        "next_gib": mean([one["next_gib"] for one in each]),
        "most_reusable": mean([one["most_reusable"] for one in each]),
        "curve": [
            point(list(points)) for points in zip(*(one["curve"] for one in each), strict=True)
        ],
        "computed": computed,
    }
    return {**joined, "line": advice_line(joined)}


def join_worth(each: Sequence[CacheWorth]) -> CacheWorth:
    """What several engines have saved. Costs of a token and parts of steps are means."""
    first = each[0]
    tenants: dict[str, Worth] = {}
    for one in each:
        for name, worth in one["tenants"].items():
            tenants[name] = _sum([tenants[name], worth]) if name in tenants else worth
    return {
        **_sum(each),
        "token_s": sum(one["token_s"] for one in each) / len(each),
        "tenants": tenants,
        "sessions": [session for one in each for session in one["sessions"]],
        "last": sorted((last for one in each for last in one["last"]), key=_arrival),
        "parts": {
            name: sum(one["parts"][name] for one in each) / len(each) for name in first["parts"]
        },
    }


def _arrival(request: RequestWorth) -> float:
    return request["arrived_at"]


def _sum(each: Sequence[Worth]) -> Worth:
    return {
        "requests": sum(one["requests"] for one in each),
        "prompt_tokens": sum(one["prompt_tokens"] for one in each),
        "cached_tokens": sum(one["cached_tokens"] for one in each),
        "computed_tokens": sum(one["computed_tokens"] for one in each),
        "saved_s": sum(one["saved_s"] for one in each),
    }
