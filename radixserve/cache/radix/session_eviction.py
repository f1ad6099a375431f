"""Who will come back: sessions, their claims on nodes, leases; an order above any policy.

A sequence may belong to a session (a chat, a branch, a tenant). Where its sequences end, an open
session is anchored; its claim covers the path up to the root. Nodes fall into classes, and the
classes are monotone along a path (what is claimed, leased or public has all above it so, too):

    closed    only closed sessions reached it: dropped first
    expired   the policy's turn had come, a lease kept it, and that lease has ended: dropped next
    ordinary  the policy decides
    leased    claimed by an open session with a lease: last

Each anchor has its own lease, from the last time that a sequence ended there. A lease ends after
its time, and the first begun end while all leased nodes together fill more than a share of the
pool; a path that is longer than that share gets none. Leased pages are evictable like all others,
so they never keep anybody waiting.
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

Deadline = tuple[float, int]  # its end on the cache's clock, and a number that makes it unique


class RadixSession:
    """A session's anchors in one `RadixCache`, which made it with `open_session`."""

    __slots__ = ("_eviction", "end_nodes", "is_open", "lease_s", "name")

    def __init__(self, session_eviction: SessionAwareEviction, name: str, lease_s: float) -> None:
        self._eviction = session_eviction
        self.name = name
        self.lease_s = lease_s  # 0: none
        self.is_open = True
        self.end_nodes: dict[Node, Deadline | None] = {}  # where its sequences ended

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"RadixHolder({self.name!r}{state})"

    def close(self) -> None:
        """It will not come back: what only closed sessions reach goes first. Twice does nothing.

        O(nodes that nobody else claims).
        """
        if self.is_open:
            self._eviction.close(self)

    def belongs_to(self, session_eviction: SessionAwareEviction | None) -> bool:
        return self._eviction is session_eviction


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
        self._leased: OrderedDict[Node, None] = OrderedDict()  # whose turn has come in the policy
        self._leases: SortedDict = SortedDict()  # Lease -> (session, anchor), first to end first
        self._begun: OrderedDict[Deadline, None] = OrderedDict()  # the same, first begun first
        self._num_leases = 0  # ever given
        self.open_sessions: set[RadixSession] = set()
        self.num_leased_pages = 0

    # -- as an order of eviction --------------------------------------------------------------

    def add(self, node: Node) -> None:
        session_refs = node.session_refs
        if session_refs is None or session_refs.is_public or session_refs.num_open:
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
            session_refs = found.session_refs
            if session_refs is None or not session_refs.num_leased:
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

    def claim(self, session: RadixSession, node: Node) -> None:
        """A sequence of `session`, anchored in `node`, is about to be released; its path is locked.

        The session's anchors above move here, and a lease begins anew. O(depth).
        """
        if not session.is_open or node.namespace.is_dead or node.parent is None:
            return
        if node in session.end_nodes:
            self._end_lease(session, node)
        else:
            session.end_nodes[node] = None
            _session_refs(node).sessions.add(session)
            self._add_refs(node, 1, 0)
        at = node.parent
        while at.parent is not None:
            if session in _session_refs(at).sessions:
                self._remove_end(session, at)
            at = at.parent
        if session.lease_s:
            self._begin_lease(session, node)

    def close(self, session: RadixSession) -> None:
        session.is_open = False
        self.open_sessions.discard(session)
        for node in list(session.end_nodes):
            self._remove_end(session, node)

    def publish(self, node: Node) -> None:
        """A sequence without a session reached `node`, which is locked. O(nodes not public yet)."""
        at = node
        while (
            at.parent is not None and at.session_refs is not None and not at.session_refs.is_public
        ):
            at.session_refs.is_public = True
            self._reclassify(at)
            at = at.parent

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is the new head of the claimed node `lower`."""
        below = _session_refs(lower)
        above = upper.session_refs = SessionRefs(is_public=below.is_public)
        above.num_open = int(below.num_open > 0)
        above.num_leased = int(below.num_leased > 0)

    def on_removed(self, node: Node) -> None:
        """`node` goes, its pages are out: its sessions' anchors move to its parent.

        O(sessions anchored in `node`).
        """
        session_refs, parent = _session_refs(node), node.parent
        assert parent is not None
        for session in list(session_refs.sessions):
            assert isinstance(session, RadixSession)
            self._move_end_up(session, node, parent)
        if session_refs.num_open:  # children are left: a dead subtree is taken apart from above
            self._drop_refs(parent, 1, int(session_refs.num_leased > 0))
        self._closed.pop(node, None)
        self._expired.pop(node, None)
        self._leased.pop(node, None)
        node.session_refs = None

    def count_pages(self, node: Node, pages: int) -> None:
        """`node`, which is claimed, has that many pages more."""
        if _session_refs(node).num_leased:
            self.num_leased_pages += pages

    def leases(self) -> list[dict[str, Any]]:
        """The leases now, first to end first: session, tokens from the root, seconds left."""
        self._end_leases()
        now = self._clock()
        return [
            {"session": session.name, "tokens": node.end, "seconds_left": deadline - now}
            for (deadline, _), (session, node) in self._leases.items()
        ]

    def check(self) -> None:
        """AssertionError unless sessions, anchors and leases agree with each other."""
        leases = {}
        for session in self.open_sessions:
            assert session.is_open, f"{session!r} is among the open ones"
            for node, lease in session.end_nodes.items():
                assert node.parent is not None, f"{session!r} is anchored in a node that is gone"
                assert session in _session_refs(node).sessions, (
                    f"{session!r} is unknown to its anchor"
                )
                if lease is not None:
                    leases[lease] = (session, node)
        assert leases == dict(self._leases), "leases and anchors disagree"
        assert set(leases) == set(self._begun), "leases and their order of beginning disagree"
        for node in self._closed:
            session_refs = node.session_refs
            assert session_refs is not None, f"node {node.node_id} is public and counts as closed"
            assert not session_refs.is_public, f"node {node.node_id} is public and counts as closed"
            assert not session_refs.num_open, f"node {node.node_id} is claimed and counts as closed"

    @property
    def num_closed_pages(self) -> int:
        """O(closed nodes)."""
        return sum(len(node.pages) for node in self._closed)

    # -- claims -------------------------------------------------------------------------------

    def _remove_end(self, session: RadixSession, node: Node) -> None:
        """Take an anchor away, with its lease."""
        self._end_lease(session, node)
        del session.end_nodes[node]
        _session_refs(node).sessions.discard(session)
        self._drop_refs(node, 1, 0)

    def _move_end_up(self, session: RadixSession, node: Node, parent: Node) -> None:
        if parent.parent is None or session in _session_refs(parent).sessions:
            self._remove_end(session, node)
            return
        lease = session.end_nodes[node]
        session.end_nodes[parent] = lease
        _session_refs(parent).sessions.add(session)
        self._add_refs(parent, 1, int(lease is not None))
        if lease is not None:
            self._leases[lease] = (session, parent)
        del session.end_nodes[node]
        _session_refs(node).sessions.discard(session)
        self._drop_refs(node, 1, int(lease is not None))

    def _add_refs(self, node: Node, is_open: int, is_leased: int) -> None:
        """Count a claim in `node` and, where it is the first of its kind there, above it."""
        at = node
        while at.parent is not None and (is_open or is_leased):
            session_refs = _session_refs(at)
            session_refs.num_open += is_open
            session_refs.num_leased += is_leased
            is_open = int(is_open and session_refs.num_open == 1)
            is_leased = int(is_leased and session_refs.num_leased == 1)
            if is_leased:
                self.num_leased_pages += len(at.pages)
            at = at.parent

    def _drop_refs(self, node: Node, is_open: int, is_leased: int) -> None:
        """Undo one `_add_refs`; what changes its class moves, deepest first."""
        at = node
        while at.parent is not None and (is_open or is_leased):
            session_refs = _session_refs(at)
            session_refs.num_open -= is_open
            session_refs.num_leased -= is_leased
            is_open = int(is_open and not session_refs.num_open)
            is_leased = int(is_leased and not session_refs.num_leased)
            if is_leased:
                self.num_leased_pages -= len(at.pages)
                if at in self._leased:
                    del self._leased[at]
                    self._expired[at] = None
            if is_open:
                self._reclassify(at)
            at = at.parent

    def _reclassify(self, node: Node) -> None:
        """`node` is claimed by nobody any more, or is public now."""
        session_refs = _session_refs(node)
        if session_refs.num_open:
            return
        if session_refs.is_public:
            node.session_refs = None
        elif not node.lock_ref and not node.namespace.is_dead:
            self._policy.discard(node)
            self._expired.pop(node, None)
            self._closed[node] = None

    # -- leases -------------------------------------------------------------------------------

    def _begin_lease(self, session: RadixSession, node: Node) -> None:
        if sum(len(at.pages) for at in path(node)) > self._max_leased:
            return  # more than all leases may hold: it would only end the others
        self._num_leases += 1
        lease = session.end_nodes[node] = (self._clock() + session.lease_s, self._num_leases)
        self._leases[lease] = (session, node)
        self._begun[lease] = None
        self._add_refs(node, 0, 1)
        self._end_leases()

    def _end_lease(self, session: RadixSession, node: Node) -> None:
        lease = session.end_nodes[node]
        if lease is not None:
            del self._leases[lease], self._begun[lease]
            session.end_nodes[node] = None
            self._drop_refs(node, 0, 1)

    def _end_leases(self) -> None:
        """Those whose time is over, and the first begun while all together hold too much."""
        if not self._leases:
            return
        now = self._clock()
        while self._leases and self._leases.peekitem(0)[0][0] <= now:
            self._end_lease(*self._leases.peekitem(0)[1])
        while self._begun and self.num_leased_pages > self._max_leased:
            self._end_lease(*self._leases[next(iter(self._begun))])


def _session_refs(node: Node) -> SessionRefs:
    """The node's, made when missing: then it is one that everybody may reach."""
    if node.session_refs is None:
        node.session_refs = SessionRefs(is_public=True)
    return node.session_refs


def check_session(session: object, session_eviction: SessionAwareEviction | None) -> RadixSession:
    """`session` if that cache made it; else InvalidRequest."""
    if not isinstance(session, RadixSession) or not session.belongs_to(session_eviction):
        raise InvalidRequest("session must come from this cache's open_session")
    return session
