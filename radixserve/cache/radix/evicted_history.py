"""`EvictedHistory`: a bounded memory of what was evicted, so that a miss can be explained."""

from __future__ import annotations

EvictionPoint = tuple[
    int | str, int, bytes
]  # node serial, position, first token (int32 bytes) behind it


class EvictedHistory:
    """Remembers where evicted branches began; the oldest are forgotten, half of them at a time.

    The value of a place is the first page of what was dropped there, so that a later look-up can
    tell how far it would have matched. O(1).
    """

    __slots__ = ("_older", "max_recent", "recent")

    def __init__(self, capacity: int = 8192) -> None:
        self.max_recent = capacity // 2
        self.recent: dict[
            EvictionPoint, bytes
        ] = {}  # whoever puts more than `max_recent` into it calls `rotate`
        self._older: dict[EvictionPoint, bytes] = {}

    def __len__(self) -> int:
        return len(self.recent) + len(self._older)

    def remember(self, point: EvictionPoint, page: bytes) -> None:
        """`page`: the int32 bytes of the first tokens dropped there, at most a page."""
        self.recent[point] = page
        if len(self.recent) > self.max_recent:
            self.rotate()

    def rotate(self) -> dict[EvictionPoint, bytes]:
        """Forget the older half; returns the new `recent`, which is empty."""
        self._older, self.recent = self.recent, {}
        return self.recent

    def forget(self, node_id: int | str) -> None:
        """Nothing was ever dropped below the node `node_id`. O(capacity)."""
        for points in (self.recent, self._older):
            for point in [point for point in points if point[0] == node_id]:
                del points[point]

    def find(self, point: EvictionPoint) -> bytes:
        """The first page dropped at that place, or b""."""
        return self.recent.get(point) or self._older.get(point, b"")
