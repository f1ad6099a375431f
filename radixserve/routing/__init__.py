"""Chooses the replica of a request, by an index of all cached tokens and one cost."""
