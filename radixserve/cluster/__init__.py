"""Replicas of an engine in other processes, behind one Runtime; see docs/cluster.md."""
