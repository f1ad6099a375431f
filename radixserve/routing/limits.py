"""Limits for requests that lose their replica, in the cluster's client and in the replay."""

WITHOUT_REPLICA_S = 120.0  # how long a request waits for a replica
MAX_LOST = 3  # a request that has lost 3 replicas fails, since it may be the cause
