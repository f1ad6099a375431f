"""Several engines behind one Runtime, and the choice of a request's engine; see docs/cluster.md.

cluster_runtime.py  ClusterRuntime: a Runtime over replicas in other processes
cluster_client.py   ClusterClient: a caller's requests, lost replicas, messages to all replicas
replica.py          EngineReplica: the other side, in the replica's process
replica_link.py     the connection between the two
tree_router.py      TreeRouter: chooses a replica by cached tokens and load
token_index.py      TokenIndex: which replica has which tokens cached, by their cache events;
                    index_node.py has its nodes
replica_router.py   ReplicaRouter: feeds reports of replicas to TreeRouter
autoscaling.py      Autoscaling: the rule for the number of replicas
ray_serve.py        replicas as a deployment of Ray Serve; ray_router.py only delivers calls,
                    ray_autoscaling.py applies the rule
"""
