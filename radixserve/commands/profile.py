"""Where the time of the steps went, as a line for people."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("schedule", "prepare", "forward", "sample", "commit")


def format_profile(stats: Mapping[str, float]) -> str:
    """From `Runtime.cache_stats()`: milliseconds a step by part, and what is not the model's.

    With overlap the parts add up to more than the time that passed: the rest is overlapped.
    """
    steps = int(stats["steps"])
    seconds = {part: stats[f"{part}_s"] for part in PARTS}
    total = sum(seconds.values())
    if not steps or not total:
        return "0 steps"
    each = ", ".join(f"{part} {spent / steps * 1e3:.3f}" for part, spent in seconds.items())
    host, overlapped = total - seconds["forward"], stats.get("overlapped_s", 0.0)
    beside = ""
    if overlapped:
        beside = f", {overlapped / steps * 1e3:.3f} of it overlapped with another step"
    return (
        f"{steps} steps, {total:.3f} s; ms a step: {each}; outside the forward pass "
        f"{host / steps * 1e3:.3f} ({host / total:.1%}){beside}"
    )
