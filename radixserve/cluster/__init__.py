"""Replicas of an engine in other processes, behind one Runtime; see docs/cluster.md.

cluster_client.py   ClusterClient: a caller's requests, lost replicas, messages to all replicas
router.py           ReplicaRouter: feeds reports of replicas to `routing/tree_router.py`, which
                    chooses the replica of a request
replica.py          EngineReplica: the other side, in the replica's process
replica_link.py     the connection between the two
ray_serve.py        replicas as a deployment of Ray Serve; ray_router.py only delivers calls
"""
