"""`Leases`: end nodes of sessions that are kept until a deadline, and the nodes kept by them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from sortedcontainers import SortedDict

from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.session import Deadline, RadixSession

SessionEnd = tuple[RadixSession, Node]  # a session and one of its end nodes


class Leases:
    """Leases of one kind. `SessionAwareEviction` keeps the nodes' references in step with it."""

    __slots__ = ("_begun", "by_deadline", "chosen", "num_pages")

    def __init__(self) -> None:
        self.by_deadline: SortedDict = SortedDict()  # Deadline -> (session, end node)
        self._begun: OrderedDict[Deadline, None] = OrderedDict()  # the same, first begun
        # nodes under a lease that the policy has already chosen as victims
        self.chosen: OrderedDict[Node, None] = OrderedDict()
        self.num_pages = 0  # in nodes under a lease

    def begin(self, deadline: Deadline, session: RadixSession, node: Node) -> None:
        self.by_deadline[deadline] = (session, node)
        self._begun[deadline] = None

    def end(self, deadline: Deadline) -> None:
        del self.by_deadline[deadline], self._begun[deadline]

    def unchoose(self, node: Node) -> bool:
        """Whether `node` was among the chosen ones; it is not any more."""
        is_chosen = node in self.chosen
        if is_chosen:
            del self.chosen[node]
        return is_chosen

    def first_expired(self, now: float) -> SessionEnd | None:
        """A lease that has ended by then; the first one to end."""
        if not self.by_deadline or self.by_deadline.keys()[0][0] > now:
            return None
        first: SessionEnd = self.by_deadline.peekitem(0)[1]
        return first

    def oldest(self) -> SessionEnd | None:
        """The lease that began first."""
        for deadline in self._begun:
            oldest: SessionEnd = self.by_deadline[deadline]
            return oldest
        return None

    def ends(self) -> dict[Node, float]:
        """When each node's last lease ends. O(nodes under a lease)."""
        found: dict[Node, float] = {}
        for (end, _), (_, node) in reversed(self.by_deadline.items()):
            for at in path(node):
                if at in found:
                    break
                found[at] = end
        return found

    def check(self, found: Mapping[Deadline, SessionEnd]) -> None:
        """AssertionError unless these are the leases. `found`: what the sessions say."""
        assert found == dict(self.by_deadline), "leases and end nodes disagree"
        assert set(found) == set(self._begun), "leases and their order of beginning disagree"
