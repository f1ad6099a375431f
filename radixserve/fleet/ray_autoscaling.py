"""Autoscaling with Ray Serve, by the load that engines report.

Ray Serve's own count of ongoing requests does not show the load, since each frontend has a single
long call to a replica. The rest is Ray Serve's: metrics, delays, bounds, and which replica is
stopped. Ray Serve copies this module into its controller, so it imports nothing of the package at
run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from radixserve.fleet.autoscaling import Autoscaling

LOAD = "num_requests"  # metric of a replica: requests in its engine, running and waiting


def load_policy(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas at which the average load is the target, and an empty state. Ray Serve
    then applies its delays and bounds.

    While the load of a replica is unknown, none is removed.
    """
    assert context.config is not None
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    wanted = sum(loads.values()) / context.config.target_ongoing_requests
    if len(loads) < len(context.running_replicas) or not loads:
        wanted = max(wanted, context.target_num_replicas)
    return wanted, {}


def serve_config(rule: Autoscaling, num_replicas: int, target: float) -> dict[str, Any]:
    """Ray Serve's autoscaling_config. `num_replicas`: at the beginning. `target`: requests per
    replica."""
    return {
        "initial_replicas": num_replicas,
        "min_replicas": rule.min_replicas,
        "max_replicas": rule.max_replicas,
        "target_ongoing_requests": target,
        "metrics_interval_s": rule.metrics_interval_s,
        "look_back_period_s": rule.look_back_period_s,
        "upscale_delay_s": rule.upscale_delay_s,
        "downscale_delay_s": rule.downscale_delay_s,
        "policy": {"policy_function": f"{__name__}:{load_policy.__name__}"},
    }
