"""Callbacks that are notified when the replicas of a Ray Serve application change.

This is a separate module because Ray Serve copies a request router's module with all its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_followers: dict[str, Callable[[Sequence[str]], None]] = {}  # by the application's name


def follow(application: str, note: Callable[[Sequence[str]], None]) -> None:
    """Call `note` with the names of all replicas of the application whenever they change."""
    _followers[application] = note


def forget(application: str) -> None:
    """Remove the application's callback."""
    _followers.pop(application, None)


def note(application: str, replicas: Sequence[str]) -> None:
    """The set of replicas has changed: notify the follower of the application."""
    follower = _followers.get(application)
    if follower is not None:
        follower(replicas)
