"""Traces of requests through the real cache and the real scheduler, without a model; no torch."""

from radixserve.replay.bounds import clairvoyant_hits
from radixserve.replay.caches import CacheSpec, ReplayResult, cross, parse_tokens
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.reader import read_trace
from radixserve.replay.replicas import Cluster, ClusterResult, Failures, replay_replicas
from radixserve.replay.scheduled import ScheduledResult, Serving, replay_scheduled
from radixserve.replay.study import Study, study_document, study_trace
from radixserve.replay.trace import Trace, TraceRequest
from radixserve.routing.autoscaling import Autoscaling

__all__ = [
    "Autoscaling",
    "CacheSpec",
    "Cluster",
    "ClusterResult",
    "Failures",
    "PathTable",
    "ReplayResult",
    "ScheduledResult",
    "Serving",
    "Study",
    "Trace",
    "TraceRequest",
    "build_paths",
    "clairvoyant_hits",
    "cross",
    "parse_tokens",
    "read_trace",
    "replay_direct",
    "replay_replicas",
    "replay_scheduled",
    "study_document",
    "study_trace",
]
