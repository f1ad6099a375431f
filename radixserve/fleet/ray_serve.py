"""`start_replicas`: replicas as a deployment of Ray Serve, which places, checks and restarts
them."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray import serve

from radixserve.checks import check_int
from radixserve.config import EngineConfig
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import EngineMessage
from radixserve.errors import InvalidRequest
from radixserve.fleet import frontends
from radixserve.fleet.autoscaling import Autoscaling
from radixserve.fleet.cluster_client import DRAIN_S, SILENCE_S, ClusterClient
from radixserve.fleet.cluster_runtime import ClusterRuntime
from radixserve.fleet.ray_autoscaling import LOAD, serve_config
from radixserve.fleet.ray_router import ReplicaRequestRouter
from radixserve.fleet.replica import EngineReplica, ReplicaReport
from radixserve.fleet.replica_router import ReplicaRouter
from radixserve.models.names import check_model_name
from radixserve.request import Request

_MAX_CALLS = 100_000  # that Ray Serve lets run at a time on a replica, whose engine has the queue
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_STOP_S = 5.0  # time to stop a removed replica after its requests have ended or moved


class ReplicaDeployment:
    """An `EngineReplica` as Ray Serve runs it. Each call names its replica; another one refuses
    it."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._replica = EngineReplica(model, settings)

    async def name(self, _: str) -> str:
        return self._name

    async def ask(self, replica: str, method: str, *args: Any) -> Any:
        self._check(replica)
        return await getattr(self._replica, method)(*args)

    async def reports(
        self, replica: str, frontend: str, stream: int
    ) -> AsyncGenerator[ReplicaReport, None]:
        self._check(replica)
        async for report in self._replica.reports(frontend, stream):
            yield report

    async def check_health(self) -> None:
        await self._replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The replica's load, which Ray Serve asks for if the deployment is autoscaled."""
        return {LOAD: float(self._replica.num_requests)}

    def _check(self, replica: str) -> None:
        if replica != self._name:
            raise LookupError(f"replica {replica} has stopped")


class _RayLink:
    """A `ReplicaLink` over a handle of Ray Serve."""

    def __init__(self, handle: Any, name: str) -> None:
        self.name = name
        self._handle = handle

    async def facts(self) -> EngineFacts:
        return await self._handle.ask.remote(self.name, "facts")

    async def reports(self, frontend: str, stream: int) -> AsyncGenerator[ReplicaReport, None]:
        call = self._handle.options(method_name="reports", stream=True)
        reports = call.remote(self.name, frontend, stream)
        try:
            async for report in reports:
                yield report
        finally:  # Ray Serve stops a removed replica only after its last call
            reports.cancel()

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool:
        return await self._handle.ask.remote(self.name, "submit", frontend, stream, requests)

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None:
        await self._handle.ask.remote(self.name, "end", frontend, stream, request_ids)

    async def resync(self, frontend: str, stream: int) -> None:
        await self._handle.ask.remote(self.name, "resync", frontend, stream)

    async def call(self, message: EngineMessage[Any]) -> Any:
        return await self._handle.ask.remote(self.name, "call", message)


def _check_replicable(config: EngineConfig) -> None:
    """Raise InvalidRequest for settings that name one file or address."""
    if config.trace is not None:
        raise InvalidRequest("trace cannot be given with replicas: each would write the file")
    if config.kv_events is not None:
        raise InvalidRequest(
            "kv_events cannot be given with replicas: each would take the address; other routers "
            "need a server for each replica"
        )


def _join_ray(address: str) -> None:
    if not ray.is_initialized():
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )


def _cores_of_each(num_replicas: int, *, is_new: bool, may_grow: bool) -> float:
    """The cores that Ray reserves for a replica. `is_new`: the cluster is this machine alone.
    `may_grow`: Ray may add machines to a running one."""
    cores: float = max(1, (os.cpu_count() or 1) // num_replicas) if is_new else 1
    if is_new or not may_grow:
        cores = min(cores, ray.cluster_resources().get("CPU", 1) / num_replicas)
    return cores


def start_replicas(
    model: str,
    settings: Mapping[str, Any],
    num_replicas: int,
    *,
    autoscaling: Autoscaling | Mapping[str, Any] | str | None = None,
    address: str | None = None,
    num_cpus: float | None = None,
    silence_s: float = SILENCE_S,
    name: str | None = None,
) -> ClusterRuntime:
    """Start `num_replicas` engines of `model`. Returns when the first one is ready.

    settings      fields of EngineConfig
    autoscaling   add and remove replicas by load; `num_replicas` are started
    address       of a running Ray cluster, "auto" for the one that Ray finds; None: a new one on
                  this machine, which ends with the Runtime
    num_cpus      cores that Ray reserves for each replica; None: an equal part of the cores on this
                  machine, 1 in a running cluster
    silence_s     seconds without a report after which a replica counts as lost
    name          of the application in Ray Serve

    Raises InvalidRequest for wrong settings.
    """
    config = EngineConfig(**settings)
    rule = None if autoscaling is None else Autoscaling.read("autoscaling", autoscaling)
    if rule is None:
        max_replicas = check_int("num_replicas", num_replicas, 1)
        scale: dict[str, Any] = {"num_replicas": max_replicas}
    else:
        check_int("num_replicas", num_replicas, rule.min_replicas, rule.max_replicas)
        max_replicas, target = rule.max_replicas, rule.target(config.max_running_requests)
        scale = {"autoscaling_config": serve_config(rule, num_replicas, target)}
    _check_replicable(config)
    check_model_name(model)
    # Replicas have another working directory.
    model = os.path.abspath(model) if os.path.exists(model) else model
    is_new = address is None
    _join_ray("local" if address is None else address)
    if num_cpus is None:
        num_cpus = _cores_of_each(max_replicas, is_new=is_new, may_grow=rule is not None)
    name = name or f"radixserve-{uuid.uuid4().hex[:8]}"
    num_gpus = config.tensor_parallel_size if config.device.startswith("cuda") else 0
    client = ClusterClient(ReplicaRouter(), silence_s=silence_s)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    made: Any = serve.deployment(ReplicaDeployment)
    deployment = made.options(
        name="replica",
        **scale,
        max_ongoing_requests=_MAX_CALLS,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S + _STOP_S,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        request_router_config={"request_router_class": ReplicaRequestRouter},
    )

    def note(names: Sequence[str]) -> None:
        client.set_replicas([_RayLink(handle, replica_name) for replica_name in names])

    def close() -> None:
        frontends.forget(name)
        serve.delete(name)
        if is_new:
            serve.shutdown()
            ray.shutdown()

    frontends.follow(name, note)
    app = deployment.bind(model, dict(settings))
    try:
        handle = serve.run(app, name=name, route_prefix=None)
        # The first call makes Ray Serve's router, which notifies `note` of the replicas.
        handle.name.remote("").result()
        return ClusterRuntime(client, config, close)
    except BaseException:
        client.close()
        close()
        raise
