"""`EvictedHistory`: a bounded record of evicted branches, to explain misses."""

from __future__ import annotations

EvictionPoint = tuple[int | str, int, bytes]  # node id, position, first token (int32) after it


class EvictedHistory:
    """Remembers where evicted branches began; the oldest are forgotten, half of them at a time.

    The value of a point is the first page of what was dropped there, from which a later look-up
    computes how far it would have matched. O(1).
    """

    __slots__ = ("_max_recent", "_older", "_recent")

    def __init__(self, capacity: int = 8192) -> None:
        self._max_recent = capacity // 2
        self._recent: dict[EvictionPoint, bytes] = {}
        self._older: dict[EvictionPoint, bytes] = {}

    def remember(self, point: EvictionPoint, page: bytes) -> None:
        """`page`: the int32 bytes of the first tokens dropped there, at most a page."""
        recent = self._recent
        recent[point] = page
        if len(recent) > self._max_recent:
            self._older, self._recent = recent, {}

    def forget(self, node_id: int | str) -> None:
        """Delete the points of that node. O(capacity)."""
        for points in (self._recent, self._older):
            for point in [point for point in points if point[0] == node_id]:
                del points[point]

    def find(self, point: EvictionPoint) -> bytes:
        """The first page dropped at that point, or b""."""
        return self._recent.get(point) or self._older.get(point, b"")
