"""Limits for requests that lose their replica, shared by the cluster's client and the replay."""

WITHOUT_REPLICA_S = 120.0  # how long requests wait for one
MAX_LOST = 3  # replicas that end under a request: it may be what ends them
