"""Scores that are kept in the tree: log-probabilities of cached tokens."""

from radixserve.scores.kept_scores import KeptScores

__all__ = ["KeptScores"]
