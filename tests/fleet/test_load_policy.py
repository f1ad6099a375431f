"""The policy that Ray Serve asks how many replicas there are to be."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from radixserve.fleet.autoscaling import Autoscaling
from radixserve.fleet.ray_autoscaling import LOAD, load_policy, serve_config


def context(loads: dict[str, float], running: str, target_num: int, target: float = 4.0) -> Any:
    """As Ray Serve's AutoscalingContext."""
    return SimpleNamespace(
        aggregated_metrics={LOAD: loads} if loads else {},
        running_replicas=list(running),
        target_num_replicas=target_num,
        config=SimpleNamespace(target_ongoing_requests=target),
    )


@pytest.mark.parametrize(
    ("loads", "running", "target_num", "wanted"),
    [
        ({"a": 4.0}, "a", 1, 1.0),
        ({"a": 9.0}, "a", 1, 2.25),
        ({"a": 9.0, "b": 3.0}, "ab", 2, 3.0),
        ({"a": 1.0, "b": 1.0}, "ab", 2, 0.5),
        ({"a": 0.0, "b": 0.0}, "ab", 2, 0.0),
        ({"a": 1.0}, "ab", 2, 2.0),  # b has not reported
        ({"a": 12.0}, "ab", 2, 3.0),
        ({}, "ab", 2, 2.0),
        ({}, "", 1, 1.0),
    ],
)
def test_as_many_replicas_as_have_the_target(
    loads: dict[str, float], running: str, target_num: int, wanted: float
) -> None:
    assert load_policy(context(loads, running, target_num)) == (wanted, {})


def test_ray_serve_takes_the_settings_and_the_policy() -> None:
    pytest.importorskip("ray", reason="the cluster needs the extra [cluster]")
    from ray.serve.config import AutoscalingConfig

    rule = Autoscaling(max_replicas=5, min_replicas=2, upscale_delay_s=1, downscale_delay_s=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = AutoscalingConfig(**serve_config(rule, 3, 8.0))
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (2, 3, 5)
    assert found.get_target_ongoing_requests() == 8.0
    assert (found.upscale_delay_s, found.downscale_delay_s) == (1, 3)
    policy = found.policy.get_policy()
    assert policy(context({"a": 9.0, "b": 15.0}, "ab", 2, 8.0)) == (3.0, {})
