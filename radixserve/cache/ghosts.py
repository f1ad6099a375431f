"""`GhostList`: a bounded memory of what was evicted, so that a miss can be explained."""

from __future__ import annotations

Place = tuple[int | str, int, bytes]  # node serial, position, first token (int32 bytes) behind it


class GhostList:
    """Remembers where evicted branches began; the oldest are forgotten, half of them at a time.

    The value of a place is the first page of what was dropped there, so that a later look-up can
    tell how far it would have matched. O(1).
    """

    __slots__ = ("_old", "half", "young")

    def __init__(self, capacity: int = 8192) -> None:
        self.half = capacity // 2
        self.young: dict[Place, bytes] = {}  # whoever puts more than `half` into it calls `turn`
        self._old: dict[Place, bytes] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def remember(self, place: Place, page: bytes) -> None:
        """`page`: the int32 bytes of the first tokens dropped there, at most a page."""
        self.young[place] = page
        if len(self.young) > self.half:
            self.turn()

    def turn(self) -> dict[Place, bytes]:
        """Forget the older half; returns the new `young`, which is empty."""
        self._old, self.young = self.young, {}
        return self.young

    def forget(self, serial: int | str) -> None:
        """Nothing was ever dropped below the node `serial`. O(capacity)."""
        for places in (self.young, self._old):
            for place in [place for place in places if place[0] == serial]:
                del places[place]

    def find(self, place: Place) -> bytes:
        """The first page dropped at that place, or b""."""
        return self.young.get(place) or self._old.get(place, b"")
