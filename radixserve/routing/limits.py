"""How long a request outlives the replicas that it loses; the cluster's worker and the replay."""

WITHOUT_REPLICA_S = 120.0  # how long requests wait for one
MAX_LOST = 3  # replicas that end under a request: it may be what ends them
