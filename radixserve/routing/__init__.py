"""Chooses the replica of a request: `TreeRouter.choose`, by cached tokens and load.

`TokenIndex` knows which replica has which tokens cached, from the replicas' cache events.
"""
