"""How many replicas there are to be, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from radixserve.errors import InvalidRequest
from radixserve.fleet.autoscaling import Autoscaling


def test_replicas_by_load() -> None:
    rule = Autoscaling(min_replicas=2, max_replicas=5)
    target = rule.target(max_running_requests=64)
    assert target == 32
    loads = [(0, 2), (64, 2), (64.5, 3), (96, 3), (160, 5), (1e6, 5)]
    for num_ongoing, wanted in loads:
        assert rule.num_wanted(num_ongoing, target) == wanted, num_ongoing
    assert Autoscaling(max_replicas=2).target(max_running_requests=1) == 1
    assert Autoscaling(max_replicas=2, target_ongoing_requests=0.5).target(64) == 0.5


def test_it_is_read_from_text_mappings_and_itself() -> None:
    rule = Autoscaling(max_replicas=4, min_replicas=2, upscale_delay_s=0.5)
    assert Autoscaling.read("--autoscaling", rule) is rule
    fields = {"max_replicas": 4, "min_replicas": 2, "upscale_delay_s": 0.5}
    assert Autoscaling.read("autoscaling", fields) == rule
    text = "max_replicas=4, min_replicas=2,upscale_delay_s=0.5,"
    assert Autoscaling.read("autoscaling", text) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "needs max_replicas"),
        ("min_replicas=2", "needs max_replicas"),
        ("max_replicas=2.5", "--autoscaling: max_replicas must be a number, got '2.5'"),
        ("max_replicas", "--autoscaling: max_replicas must be a number, got ''"),
        ("1-4", "--autoscaling must be one of max_replicas, min_replicas"),
        (4, "--autoscaling must be a text such as max_replicas=4, got 4"),
        ({"max_replicas": 4, "most": 3}, "unknown Autoscaling name 'most'; allowed: max_replicas"),
        ({"max_replicas": -1}, "max_replicas must be between 1 and 1024, got -1"),
        ({"max_replicas": 2, "min_replicas": 3}, "max_replicas must be between 3 and"),
        ({"max_replicas": 2, "min_replicas": 0}, "min_replicas must be between 1 and"),
        ({"max_replicas": 2, "target_ongoing_requests": 0}, "target_ongoing_requests must be"),
        ({"max_replicas": 2, "downscale_delay_s": -1}, "downscale_delay_s must be"),
        ({"max_replicas": 2, "upscale_delay_s": "soon"}, "upscale_delay_s must be"),
        ({"max_replicas": 2, "metrics_interval_s": 0}, "metrics_interval_s must be"),
        ({"max_replicas": 2, "look_back_period_s": 5}, "above metrics_interval_s=10, got 5"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Autoscaling.read("--autoscaling", given)
    assert words in str(refusal.value)
