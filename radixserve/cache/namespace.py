"""`Namespace`: what the namespaces of both caches have in common."""

from __future__ import annotations


class Namespace:
    """One namespace of a cache. Dead after a reset: look-ups do not find it."""

    __slots__ = ("is_dead", "name")

    def __init__(self, name: str, *, is_dead: bool = False) -> None:
        self.name = name
        self.is_dead = is_dead
