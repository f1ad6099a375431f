"""Replays traces of requests through the real cache and scheduler, without a model.

It does not import torch. A trace's times are seconds since its first request. There are four kinds
of replay:

    replay_direct       one request after another through a cache, in order of arrival; no scheduler
    replay_scheduled    through the scheduler: requests arrive at the recorded times and are served
                        in batches; the time of a step is modelled
    replay_closed_loop  through the scheduler: a session sends its next request a think time after
                        the last answer, so a slow server slows its own arrivals
    replay_replicas     through the caches of several replicas and a router

`reader.py` reads the trace formats, `caches.py` describes caches, `bounds.py` has the best possible
hit rate, `study.py` and `report.py` make the tables.
"""

from radixserve.fleet.autoscaling import Autoscaling
from radixserve.replay.bounds import clairvoyant_hits
from radixserve.replay.caches import CacheSpec, ReplayResult, cross, parse_tokens
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.reader import read_trace
from radixserve.replay.replicas import Cluster, ClusterResult, Failures, replay_replicas
from radixserve.replay.scheduled import ScheduledResult, Serving, replay_scheduled
from radixserve.replay.study import Study, study_document, study_trace
from radixserve.replay.trace import Trace, TraceRequest

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
