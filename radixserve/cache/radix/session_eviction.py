"""Session-aware eviction: refs and leases of sessions, applied before the eviction policy.

A sequence may belong to a session (a chat, a branch, a tenant). The nodes where its sequences ended
are the session's end nodes; it reaches their whole paths. Nodes fall into classes, and a node's
ancestors are never in a class that goes earlier:

    closed    only closed sessions reached it: dropped first
    expired   the policy's turn had come, a lease kept it, and that lease has ended: dropped next
    ordinary  the policy decides
    leased    reached by an open session with a lease: last

Each end node has its own lease, from the last time that a sequence ended there. A lease ends at its
deadline, and the first begun end while all leased nodes together fill more than a share of the
pool; a path that is longer than that share gets none. Leased pages remain evictable, so a lease
never blocks an allocation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sortedcontainers import SortedDict

from radixserve.cache.radix.evicted_history import EvictionPoint
from radixserve.cache.radix.eviction import EvictionOrder, PathUse
from radixserve.cache.radix.node import Node, SessionRefs, path
from radixserve.errors import InvalidRequest

Deadline = tuple[float, int]  # a lease's end on the cache's clock; a number that makes it unique


class RadixSession:
    """A session's end nodes in one `RadixCache`, which made it with `open_session`."""

    __slots__ = ("_order", "end_nodes", "is_open", "lease_s", "name")

    def __init__(self, order: SessionAwareEviction, name: str, lease_s: float) -> None:
        self._order = order
        self.name = name
        self.lease_s = lease_s  # 0: none
        self.is_open = True
        self.end_nodes: dict[Node, Deadline | None] = {}  # None: no lease

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"RadixSession({self.name!r}{state})"

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent.

        O(nodes that no other session reaches).
        """
        if self.is_open:
            self._order.close(self)

    def belongs_to(self, order: SessionAwareEviction | None) -> bool:
        return self._order is order


class SessionAwareEviction(EvictionOrder):
    """Sessions above a policy. Owns every `SessionRefs`; a cache without sessions has none."""

    def __init__(self, policy: EvictionOrder, max_leased: int, clock: Callable[[], float]) -> None:
        self._policy = policy
        self.initial_key = policy.initial_key
        self.tracks_use = policy.tracks_use
        self.tracks_evictions = policy.tracks_evictions
        self._max_leased = max_leased  # pages
        self._clock = clock
        self._closed: OrderedDict[Node, None] = OrderedDict()
        self._expired: OrderedDict[Node, None] = OrderedDict()
        # leased nodes that the policy has already selected as victims
        self._leased: OrderedDict[Node, None] = OrderedDict()
        self._leases: SortedDict = SortedDict()  # Deadline -> (session, end node), first to end
        self._begun: OrderedDict[Deadline, None] = OrderedDict()  # the same, first begun
        self._num_leases = 0  # ever given
        self.open_sessions: set[RadixSession] = set()
        self.num_leased_pages = 0

    # -- EvictionOrder ------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        refs = node.session_refs
        if refs is None or refs.is_public or refs.num_open:
            self._policy.add(node)
        else:
            self._closed[node] = None

    def discard(self, node: Node) -> None:
        self._policy.discard(node)
        self._expired.pop(node, None)
        if node.session_refs is not None:
            self._closed.pop(node, None)
            self._leased.pop(node, None)

    def victim(self) -> Node | None:
        self._end_leases()
        for node in self._closed:
            return node
        for node in self._expired:
            return node
        while (found := self._policy.victim()) is not None:
            refs = found.session_refs
            if refs is None or not refs.num_leased:
                return found
            self._policy.discard(found)
            self._leased[found] = None
        for node in self._leased:
            return node
        return None

    def queues(self) -> list[Iterable[Node]]:
        return [self._closed, self._expired, self._leased, *self._policy.queues()]

    def on_path_used(self, node: Node, use: PathUse) -> None:
        self._policy.on_path_used(node, use)

    def on_resized(self, node: Node) -> None:
        self._policy.on_resized(node)

    def on_evicted(self, node: Node, point: EvictionPoint, num_pages: int) -> None:
        self._policy.on_evicted(node, point, num_pages)

    # -- sessions ------------------------------------------------------------------------------

    def open(self, name: str, lease_s: float) -> RadixSession:
        session = RadixSession(self, name, lease_s)
        self.open_sessions.add(session)
        return session

    def add_end(self, session: RadixSession, node: Node) -> None:
        """A sequence of `session` that ends in `node` is about to be released; its path is locked.

        The session's end nodes above move here, and a lease begins anew. O(depth).
        """
        if not session.is_open or node.namespace.is_dead or node.parent is None:
            return
        if node in session.end_nodes:
            self._end_lease(session, node)
        else:
            session.end_nodes[node] = None
            _refs(node).sessions.add(session)
            self._add_refs(node, 1, 0)
        for above in path(node.parent):
            if session in _refs(above).sessions:
                self._remove_end(session, above)
        if session.lease_s:
            self._begin_lease(session, node)

    def close(self, session: RadixSession) -> None:
        session.is_open = False
        self.open_sessions.discard(session)
        for node in list(session.end_nodes):
            self._remove_end(session, node)

    def make_public(self, node: Node) -> None:
        """A sequence without a session reached `node`, which is locked. O(nodes not public yet)."""
        for at in path(node):
            refs = at.session_refs
            if refs is None or refs.is_public:
                return
            refs.is_public = True
            self._reclassify(at)

    def on_split(self, upper: Node, lower: Node) -> None:
        """`upper` is the new upper part of the node `lower`, which has session refs."""
        below = _refs(lower)
        above = upper.session_refs = SessionRefs(is_public=below.is_public)
        above.num_open = int(below.num_open > 0)
        above.num_leased = int(below.num_leased > 0)

    def on_removed(self, node: Node) -> None:
        """`node` is removed, its pages already are: sessions that ended there end in its parent.

        O(sessions that end in `node`).
        """
        refs, parent = _refs(node), node.parent
        assert parent is not None
        for session in list(refs.sessions):
            assert isinstance(session, RadixSession)
            self._move_end_up(session, node, parent)
        if refs.num_open:  # children are left: a dead subtree is taken apart from above
            self._drop_refs(parent, 1, int(refs.num_leased > 0))
        self._closed.pop(node, None)
        self._expired.pop(node, None)
        self._leased.pop(node, None)
        node.session_refs = None

    def count_pages(self, node: Node, pages: int) -> None:
        """`node`, which has session refs, has that many pages more."""
        if _refs(node).num_leased:
            self.num_leased_pages += pages

    def leases(self) -> list[dict[str, Any]]:
        """The leases now, first to end first: session, tokens from the root, seconds left."""
        self._end_leases()
        now = self._clock()
        return [
            {"session": session.name, "tokens": node.end, "seconds_left": end - now}
            for (end, _), (session, node) in self._leases.items()
        ]

    @property
    def num_closed_pages(self) -> int:
        """O(closed nodes)."""
        return sum(len(node.pages) for node in self._closed)

    def check(self) -> None:
        """AssertionError unless sessions, end nodes and leases agree with each other."""
        self._policy.check()
        leases = {}
        for session in self.open_sessions:
            assert session.is_open, f"{session!r} is among the open ones"
            for node, deadline in session.end_nodes.items():
                assert node.parent is not None, f"{session!r} ends in a node that is gone"
                assert session in _refs(node).sessions, f"{session!r} is unknown to its end node"
                if deadline is not None:
                    leases[deadline] = (session, node)
        assert leases == dict(self._leases), "leases and end nodes disagree"
        assert set(leases) == set(self._begun), "leases and their order of beginning disagree"
        for node in self._closed:
            refs, name = node.session_refs, f"node {node.node_id}"
            is_public = refs is None or refs.is_public
            assert not is_public, f"{name} is public and counts as closed"
            assert not refs or not refs.num_open, f"{name} is reached and counts as closed"

    # -- references ---------------------------------------------------------------------------

    def _remove_end(self, session: RadixSession, node: Node) -> None:
        """Remove `node` from the end nodes of `session`; its lease ends."""
        self._end_lease(session, node)
        del session.end_nodes[node]
        _refs(node).sessions.discard(session)
        self._drop_refs(node, 1, 0)

    def _move_end_up(self, session: RadixSession, node: Node, parent: Node) -> None:
        if parent.parent is None or session in _refs(parent).sessions:
            self._remove_end(session, node)
            return
        deadline = session.end_nodes.pop(node)
        is_leased = int(deadline is not None)
        session.end_nodes[parent] = deadline
        _refs(parent).sessions.add(session)
        self._add_refs(parent, 1, is_leased)
        if deadline is not None:
            self._leases[deadline] = (session, parent)
        _refs(node).sessions.discard(session)
        self._drop_refs(node, 1, is_leased)

    def _add_refs(self, node: Node, is_open: int, is_leased: int) -> None:
        """Count a reference in `node` and, where it is the first of its kind there, above it."""
        for at in path(node):
            refs = _refs(at)
            refs.num_open += is_open
            refs.num_leased += is_leased
            is_open = int(is_open and refs.num_open == 1)
            is_leased = int(is_leased and refs.num_leased == 1)
            if is_leased:
                self.num_leased_pages += len(at.pages)
            elif not is_open:
                return

    def _drop_refs(self, node: Node, is_open: int, is_leased: int) -> None:
        """Undo one `_add_refs`; nodes whose class changes are moved, deepest first."""
        for at in path(node):
            refs = _refs(at)
            refs.num_open -= is_open
            refs.num_leased -= is_leased
            is_open = int(is_open and not refs.num_open)
            is_leased = int(is_leased and not refs.num_leased)
            if is_leased:
                self.num_leased_pages -= len(at.pages)
                if at in self._leased:
                    del self._leased[at]
                    self._expired[at] = None
            if is_open:
                self._reclassify(at)
            elif not is_leased:
                return

    def _reclassify(self, node: Node) -> None:
        """`node` lost its last open session or became public: move it to its class."""
        refs = _refs(node)
        if refs.num_open:
            return
        if refs.is_public:
            node.session_refs = None
        elif not node.lock_ref and not node.namespace.is_dead:
            self._policy.discard(node)
            self._expired.pop(node, None)
            self._closed[node] = None

    # -- leases -------------------------------------------------------------------------------

    def _begin_lease(self, session: RadixSession, node: Node) -> None:
        if sum(len(at.pages) for at in path(node)) > self._max_leased:
            return  # exceeds the limit of all leases: it would only end the others
        self._num_leases += 1
        deadline = session.end_nodes[node] = (self._clock() + session.lease_s, self._num_leases)
        self._leases[deadline] = (session, node)
        self._begun[deadline] = None
        self._add_refs(node, 0, 1)
        self._end_leases()

    def _end_lease(self, session: RadixSession, node: Node) -> None:
        deadline = session.end_nodes[node]
        if deadline is not None:
            del self._leases[deadline], self._begun[deadline]
            session.end_nodes[node] = None
            self._drop_refs(node, 0, 1)

    def _end_leases(self) -> None:
        """End expired leases, then the oldest ones while leased pages exceed the limit."""
        if not self._leases:
            return
        now = self._clock()
        while self._leases and self._leases.peekitem(0)[0][0] <= now:
            self._end_lease(*self._leases.peekitem(0)[1])
        while self._begun and self.num_leased_pages > self._max_leased:
            self._end_lease(*self._leases[next(iter(self._begun))])


def _refs(node: Node) -> SessionRefs:
    """The node's refs, created as public if missing."""
    if node.session_refs is None:
        node.session_refs = SessionRefs(is_public=True)
    return node.session_refs


def check_session(session: object, order: SessionAwareEviction | None) -> RadixSession:
    """`session` if that cache made it; else InvalidRequest."""
    if not isinstance(session, RadixSession) or not session.belongs_to(order):
        raise InvalidRequest("session must come from this cache's open_session")
    return session
