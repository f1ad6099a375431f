"""The callbacks of this process that follow an application's replicas.

A separate module, because Ray Serve copies a request router's module with all its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_followers: dict[str, Callable[[Sequence[str]], None]] = {}  # by the application's name


def follow(application: str, note: Callable[[Sequence[str]], None]) -> None:
    """`note` is called with the names of all replicas when they change."""
    _followers[application] = note


def forget(application: str) -> None:
    _followers.pop(application, None)


def note(application: str, replicas: Sequence[str]) -> None:
    """The set of replicas has changed: notify the follower of the application."""
    follower = _followers.get(application)
    if follower is not None:
        follower(replicas)
