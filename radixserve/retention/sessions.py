"""Sessions, their leases, and eviction that respects them before it asks the eviction policy.

A sequence may belong to a session (a chat, a branch, a tenant). The nodes where its sequences ended
are the session's end nodes; it reaches their whole paths. Nodes fall into classes, and a node's
ancestors are never in a class that is evicted earlier:

    closed    only closed sessions reached it, or it was demoted: evicted first
    expired   the policy chose it, a lease kept it, and that lease has ended: evicted next
    ordinary  the policy decides
    leased    reached by an open session with a lease: evicted after all others but
    retained  reached by an open session that retains until a fixed time

Each end node has its own lease, which begins when a sequence ends there, unless the policy knows
when it is expected to be used again: that says more than a fixed time. A lease ends at its
deadline. While all leased nodes together fill more than a share of the pool, the leases that began
first end early; a path longer than that share gets none. A retaining session's leases end at its
`retain_until`; the caller that opens it bounds their pages. Leased and retained pages remain
evictable, so they never block an allocation.

A prompt of a session that parts from all its end nodes supersedes those that it shares most tokens
with, see `on_prompt`: the session no longer reaches them, and what nobody else reaches is closed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Self

from sortedcontainers import SortedDict

from radixserve.cache.interface import CacheSession
from radixserve.cache.radix.eviction import EvictionOrder, EvictionPoint, PathUse
from radixserve.cache.radix.node import Match, NamespaceTree, Node, path
from radixserve.cache.radix.retention import RetentionPolicy
from radixserve.cache.sequence import ReturnEstimate
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.checks import check_float, check_str
from radixserve.errors import InvalidRequest
from radixserve.retention.hinted_nodes import demotable, nodes_above, num_demoted
from radixserve.retention.partings import NUM_COMPARED, Partings, SessionPartings, checksum

LEASE_S = 300.0  # seconds that an open session's pages are preferred after their last use
_NEVER = ReturnEstimate(math.inf, math.inf, -math.inf, 0.0, is_regular=False)
_MAX_ENDS = 32  # of a session that supersedes some: it uses more in turn

Deadline = tuple[float, int]  # a lease's end on the cache's clock; a number that makes it unique


class SessionRefs:
    """The sessions that reach a node. `Node.retention` is None if only sequences without a session
    used the node."""

    __slots__ = (
        "is_superseded",
        "num_leased",
        "num_open",
        "num_retained",
        "sessions",
        "used_without_session",
    )

    def __init__(self, *, used_without_session: bool) -> None:
        # a sequence without a session reached it, and it has not been demoted since
        self.used_without_session = used_without_session
        self.num_open = 0  # open sessions that end here + children that open sessions reach
        self.num_leased = 0  # of both, the leased ones
        self.num_retained = 0  # of both, those that a retaining session reaches
        self.sessions: set[RadixSession] = set()  # open ones that end in this node
        self.is_superseded = False  # its session went on without it, and none has reached it since


class RadixSession:
    """A session's end nodes in one `RadixCache`, which made it with `open_session`."""

    __slots__ = (
        "_order",
        "end_nodes",
        "is_open",
        "lease_s",
        "name",
        "partings",
        "release_numbers",
        "retain_until",
    )

    def __init__(
        self, order: SessionRetention, name: str, lease_s: float, retain_until: float | None
    ) -> None:
        self._order = order
        self.name = name
        self.lease_s = lease_s  # 0: none
        self.retain_until = retain_until  # on the cache's clock; None: it does not retain
        self.is_open = True
        self.end_nodes: dict[Node, Deadline | None] = {}  # None: no lease
        self.release_numbers: dict[Node, int] = {}  # when its last sequence ended in an end node
        self.partings = SessionPartings()

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"RadixSession({self.name!r}{state})"

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent.

        O(nodes that no other session reaches).
        """
        if self.is_open:
            self._order.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def belongs_to(self, order: SessionRetention | None) -> bool:
        return self._order is order


SessionEnd = tuple[RadixSession, Node]  # a session and one of its end nodes


class Leases:
    """Leases of one kind. `SessionRetention` keeps the nodes' references in step with it."""

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
        """Take `node` from the chosen nodes. Returns whether it was one."""
        is_chosen = node in self.chosen
        if is_chosen:
            del self.chosen[node]
        return is_chosen

    def first_expired(self, now: float) -> SessionEnd | None:
        """Returns the lease with the earliest deadline, if it is not after `now`."""
        if not self.by_deadline or self.by_deadline.keys()[0][0] > now:
            return None
        first: SessionEnd = self.by_deadline.peekitem(0)[1]
        return first

    def oldest(self) -> SessionEnd | None:
        """Returns the lease that began first."""
        for deadline in self._begun:
            oldest: SessionEnd = self.by_deadline[deadline]
            return oldest
        return None

    def ends(self) -> dict[Node, float]:
        """When each node's last lease ends. O(nodes under a lease)."""
        ends: dict[Node, float] = {}
        for (end, _), (_, node) in reversed(self.by_deadline.items()):
            for ancestor in path(node):
                if ancestor in ends:
                    break
                ends[ancestor] = end
        return ends

    def check(self, leases: Mapping[Deadline, SessionEnd]) -> None:
        """AssertionError unless these are the leases. `leases`: those of the sessions."""
        assert leases == dict(self.by_deadline), "leases and end nodes disagree"
        assert set(leases) == set(self._begun), "leases and their order of beginning disagree"


class SessionRetention(RetentionPolicy):
    """Wraps an eviction policy so that sessions take precedence over it. Owns every `SessionRefs`;
    a cache without sessions has none."""

    def __init__(
        self,
        policy: EvictionOrder,
        max_leased: int,
        clock: Callable[[], float],
        partings: Partings | None = None,
    ) -> None:
        """`max_leased`: pages. `partings`: tells what sessions leave for good; None: a new one."""
        self._policy = policy
        self.initial_key = policy.initial_key
        self.tracks_use = policy.tracks_use
        self.tracks_evictions = policy.tracks_evictions
        self.tracks_returns = policy.tracks_returns
        self._max_leased = max_leased  # pages
        self._clock = clock
        self._closed: OrderedDict[Node, None] = OrderedDict()
        self._expired: OrderedDict[Node, None] = OrderedDict()
        self._leased: Leases = Leases()
        self._retained: Leases = Leases()
        self._num_leases = 0  # ever given
        self.open_sessions: set[RadixSession] = set()
        self.num_releases = 0  # of sequences of sessions
        self.partings = Partings() if partings is None else partings
        self.num_superseded = 0  # tokens, since the start
        self.num_retained_evicted = 0  # pages evicted while retained

    # -- EvictionOrder ------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        refs = node.retention
        if refs is None or refs.used_without_session or refs.num_open:
            self._policy.add(node)
        else:
            self._closed[node] = None

    def discard(self, node: Node) -> None:
        self._policy.discard(node)
        self._expired.pop(node, None)
        if node.retention is not None:
            self._closed.pop(node, None)
            self._leased.chosen.pop(node, None)
            self._retained.chosen.pop(node, None)

    def victim(self) -> Node | None:
        self.end_leases()
        for node in self._closed:
            return node
        for node in self._expired:
            return node
        while (victim := self._policy.victim()) is not None:
            refs = victim.retention
            if refs is None or not (refs.num_leased or refs.num_retained):
                return victim
            self._policy.discard(victim)
            (self._retained if refs.num_retained else self._leased).chosen[victim] = None
        for node in chain(self._leased.chosen, self._retained.chosen):
            return node
        return None

    def pop(self, num_pages: int) -> Node | None:
        node = self.victim()
        if node is not None:
            size, refs = len(node.pages), node.retention
            if refs is not None and refs.num_retained:
                self.num_retained_evicted += min(num_pages, size)
            if size <= num_pages:
                self.discard(node)
        return node

    def preview(self) -> Iterator[tuple[Node, str]]:
        self.end_leases()
        for node in self._closed:
            if _is_superseded(node):
                yield node, "superseded: its session went on without it"
            else:
                yield node, "only closed sessions reached it"
        for node in self._expired:
            yield node, "kept by a lease that has ended"
        leased, retained = [*self._leased.chosen], [*self._retained.chosen]
        for node, reason in self._policy.preview():
            refs = node.retention
            if refs is not None and refs.num_retained:
                retained.append(node)
            elif refs is not None and refs.num_leased:
                leased.append(node)
            else:
                yield node, reason
        for node in leased:
            yield node, "leased by an open session: nothing else is left"
        ends, now = self._retained.ends(), self._clock()
        for node in retained:
            left = f"{ends[node] - now:.0f} s from now"
            yield node, f"retained until {left}: nothing else is left"

    def queues(self) -> list[Iterable[Node]]:
        chosen = [self._leased.chosen, self._retained.chosen]
        return [self._closed, self._expired, *chosen, *self._policy.queues()]

    def on_path_used(self, node: Node, use: PathUse) -> None:
        self._policy.on_path_used(node, use)

    def note_release(self, node: Node, expected: ReturnEstimate | None, reused: int) -> None:
        self._policy.note_release(node, expected, reused)

    def expect(self, node: Node, expected: ReturnEstimate) -> None:
        self._policy.expect(node, expected)

    def adopt(self, wait_s: float, late_s: float, probability: float, is_regular: bool) -> None:
        """Leases end: what is expected takes their place."""
        for node in self._leased.chosen:
            self._policy.add(node)
        self._leased.chosen.clear()
        while (oldest := self._leased.oldest()) is not None:
            self._end_lease(*oldest)
        self._policy.adopt(wait_s, late_s, probability, is_regular)

    def expected_return(self, node: Node) -> ReturnEstimate | None:
        return _NEVER if node in self._closed else self._policy.expected_return(node)

    def on_resized(self, node: Node) -> None:
        self._policy.on_resized(node)

    def on_evicted(self, node: Node, point: EvictionPoint, num_pages: int) -> None:
        self._policy.on_evicted(node, point, num_pages)

    # -- sessions ------------------------------------------------------------------------------

    @property
    def num_leased_pages(self) -> int:
        self.end_leases()
        return self._leased.num_pages

    @property
    def num_retained_pages(self) -> int:
        self.end_leases()
        return self._retained.num_pages

    def open(self, name: str, lease_s: float | None, retain_until: float | None) -> RadixSession:
        check_str("name", name)
        lease = LEASE_S if lease_s is None else check_float("lease_s", lease_s, 0.0, math.inf)
        if retain_until is not None:
            retain_until = check_float("retain_until", retain_until, 0.0, math.inf)
        session = RadixSession(self, name, lease, retain_until)
        self.open_sessions.add(session)
        return session

    def check_session(self, session: object) -> RadixSession:
        if not isinstance(session, RadixSession) or not session.belongs_to(self):
            raise InvalidRequest("session must come from this cache's open_session")
        return session

    def on_attached(self, leaf: Node, session: CacheSession | None) -> None:
        if session is not None:
            leaf.retention = SessionRefs(used_without_session=False)
        elif leaf.parent is not None:
            self.mark_used_without_session(leaf.parent)

    def may_extend(self, leaf: Node, session: CacheSession | None) -> bool:
        refs = leaf.retention
        if refs is None:
            return session is None
        return refs.used_without_session == (session is None) and not refs.sessions

    def must_split(self, node: Node, session: CacheSession | None) -> bool:
        """Only the used part gets the refs of a session, or counts as used without one."""
        refs = node.retention
        if session is None:
            return refs is not None and not refs.used_without_session
        return session.is_open and session not in (refs.sessions if refs else ())

    def on_released(self, node: Node, session: CacheSession | None) -> None:
        if session is None:
            self.mark_used_without_session(node)
        else:
            self.add_end(self.check_session(session), node)

    def add_end(self, session: RadixSession, node: Node) -> None:
        """Make `node` an end node of `session`: a sequence of it that ends there is about to be
        released. Its path is locked.

        End nodes of the session above `node` move to it, and a new lease begins. O(depth).
        """
        if not session.is_open or node.namespace.is_dead or node.parent is None:
            return
        self.num_releases += 1
        session.release_numbers[node] = self.num_releases
        if node in session.end_nodes:
            self._end_lease(session, node)
        else:
            session.end_nodes[node] = None
            _refs(node).sessions.add(session)
            self._add_refs(node, True, False, False)
        for above in path(node.parent):
            if session in _refs(above).sessions:
                self._remove_end(session, above)
        is_foreseen = self.tracks_returns and self._policy.expected_return(node) is not None
        if session.retain_until is not None or (session.lease_s and not is_foreseen):
            self._begin_lease(session, node)

    def close(self, session: RadixSession) -> None:
        session.is_open = False
        self.open_sessions.discard(session)
        self.partings.close(session.partings)
        for node in list(session.end_nodes):
            self._remove_end(session, node)

    def on_prompt(
        self, match: Match, prompt: memoryview, session: CacheSession, num_releases: int | None
    ) -> None:
        """Supersede what the prompt leaves behind: if it continues none of the session's end nodes,
        those that share most tokens with it, unless sessions come back to what they leave there.

        Left alone are end nodes where sequences ended after the prompt was sent: sub-agents at work
        together. O(depth times end nodes of the session); O(tokens) if the prompt leaves any.
        """
        mine = self.check_session(session)
        self.partings.note_prompt(mine.partings, prompt)
        if not mine.is_open or len(mine.end_nodes) > _MAX_ENDS:
            return
        since = self.num_releases if num_releases is None else num_releases
        position, ends = _left_behind(mine, match, prompt, since)
        if not ends:
            return
        prefix = checksum(prompt, position)
        is_past = self.partings.is_left_for_good(prefix)
        for end in ends:
            left = _tokens_after(end, position)
            self.partings.begin(mine.partings, prefix, position, left)
            if is_past:
                self._supersede(mine, end, position)

    def _supersede(self, session: RadixSession, end: Node, position: int) -> None:
        """The session left `end` after `position` tokens."""
        self._remove_end(session, end)
        for node in path(end):
            refs = node.retention
            if node.end <= position or refs is None or refs.used_without_session or refs.num_open:
                return
            refs.is_superseded = True
            self.num_superseded += node.end - max(node.start, position)

    def mark_used_without_session(self, node: Node) -> None:
        """Note that a sequence without a session used the path to `node`, which is locked. O(nodes
        that only sessions used before)."""
        for ancestor in path(node):
            refs = ancestor.retention
            if refs is None or refs.used_without_session:
                return
            refs.used_without_session = True
            self._reclassify(ancestor)

    def demote(self, match: Match, num_tokens: int) -> int:
        """Until a sequence without a session uses them. Nodes that open sessions reach keep their
        place. O(nodes below the match)."""
        nodes = demotable(match, num_tokens)  # each before its parent
        for node in nodes:
            _refs(node).used_without_session = False
            self._reclassify(node)
        return num_demoted(nodes)

    def demote_session(self, session: CacheSession) -> int:
        """O(nodes that it reaches)."""
        nodes = nodes_above(self.check_session(session).end_nodes)
        session.close()
        return num_demoted(nodes)

    def held_tokens(self, sessions: Iterable[CacheSession], page_size: int) -> int:
        """O(nodes that they reach)."""
        mine = [self.check_session(session) for session in sessions]
        nodes = nodes_above(chain.from_iterable(session.end_nodes for session in mine))
        return sum(len(node.pages) for node in nodes) * page_size

    def session_ends(self, session: CacheSession) -> list[Node]:
        return list(self.check_session(session).end_nodes)

    def on_split(self, upper: Node, lower: Node) -> None:
        """Give `upper`, the new upper part of `lower`, the session refs that follow from those of
        `lower`."""
        below = _refs(lower)
        above = upper.retention = SessionRefs(used_without_session=below.used_without_session)
        above.num_open = int(below.num_open > 0)
        above.num_leased = int(below.num_leased > 0)
        above.num_retained = int(below.num_retained > 0)
        above.is_superseded = below.is_superseded

    def on_removed(self, node: Node) -> None:
        """Move the sessions that end in `node` to its parent: `node` and its pages are removed.

        O(sessions that end in `node`).
        """
        refs, parent = _refs(node), node.parent
        assert parent is not None
        for session in list(refs.sessions):
            self._move_end_up(session, node, parent)
        assert not refs.num_open, "children that sessions reach are left"
        self._closed.pop(node, None)
        self._expired.pop(node, None)
        self._leased.chosen.pop(node, None)
        self._retained.chosen.pop(node, None)
        node.retention = None

    def on_reset(self, namespace: NamespaceTree) -> None:
        """Remove the end nodes and leases in `namespace`, which is about to be dropped. O(end nodes
        of open sessions)."""
        for session in self.open_sessions:
            for node in [node for node in session.end_nodes if node.namespace is namespace]:
                self._remove_end(session, node)

    def count_pages(self, node: Node, pages: int) -> None:
        """Count `pages` more pages in `node`, which has session refs."""
        refs = _refs(node)
        if refs.num_leased:
            self._leased.num_pages += pages
        if refs.num_retained:
            self._retained.num_pages += pages

    def leases(self) -> list[dict[str, Any]]:
        """Returns the leases, the first to end first, as {"session", "tokens", "seconds_left"};
        tokens count from the root. Leases of retaining sessions are left out."""
        self.end_leases()
        now = self._clock()
        return [
            {"session": session.name, "tokens": node.end, "seconds_left": end - now}
            for (end, _), (session, node) in self._leased.by_deadline.items()
        ]

    def state(self, node: Node) -> str:
        """Returns the state of an unlocked node: "closed", "superseded", "retained", "leased" or
        "cached"."""
        if node in self._closed:
            return "superseded" if _is_superseded(node) else "closed"
        refs = node.retention
        if refs is None or not (refs.num_leased or refs.num_retained):
            return "cached"
        return "retained" if refs.num_retained else "leased"

    def refresh(self) -> None:
        self.end_leases()

    def names(self, node: Node, limit: int) -> tuple[list[str], int]:
        refs = node.retention
        if refs is None:
            return [], 0
        return [session.name for session in islice(refs.sessions, limit)], refs.num_open

    def kept_nodes(self) -> Iterator[Node]:
        seen: set[int] = set()
        for session in self.open_sessions:
            for end, deadline in session.end_nodes.items():
                if deadline is None:
                    continue
                for node in path(end):
                    if id(node) in seen:
                        break
                    seen.add(id(node))
                    yield node

    def stats(self) -> dict[str, Any]:
        return {
            "pages_retained": self.num_retained_pages,
            "retained_evicted_pages": self.num_retained_evicted,
            "superseded_tokens": self.num_superseded,
            "sessions": len(self.open_sessions),
            "leases": self.leases(),
            "pages_leased": self.num_leased_pages,
            "pages_closed": self.num_closed_pages,
        }

    @property
    def num_closed_pages(self) -> int:
        """Pages of closed sessions in live namespaces. O(closed nodes)."""
        return sum(len(node.pages) for node in self._closed if not node.namespace.is_dead)

    def check(self) -> None:
        """AssertionError unless sessions, end nodes and leases agree with each other."""
        self._policy.check()
        leases: dict[bool, dict[Deadline, tuple[RadixSession, Node]]] = {False: {}, True: {}}
        for session in self.open_sessions:
            assert session.is_open, f"{session!r} is among the open ones"
            ends = session.end_nodes.keys()
            assert ends == session.release_numbers.keys(), f"{session!r}: end nodes without number"
            for node, deadline in session.end_nodes.items():
                assert node.parent is not None, f"{session!r} ends in a node that is gone"
                assert session in _refs(node).sessions, f"{session!r} is unknown to its end node"
                if deadline is not None:
                    leases[session.retain_until is not None][deadline] = (session, node)
        self._leased.check(leases[False])
        self._retained.check(leases[True])
        assert all(_refs(node).num_leased for node in self._leased.chosen), "not leased"
        assert all(_refs(node).num_retained for node in self._retained.chosen), "not retained"
        for node in self._closed:
            refs, name = node.retention, f"node {node.node_id}"
            used_without_session = refs is None or refs.used_without_session
            assert not used_without_session, f"{name} is used without session and closed"
            assert not refs or not refs.num_open, f"{name} is reached and counts as closed"

    def check_nodes(self, nodes: list[Node]) -> None:
        _check_refs(self, nodes)

    # -- references ---------------------------------------------------------------------------

    def _remove_end(self, session: RadixSession, node: Node) -> None:
        """Remove `node` from the end nodes of `session`; its lease ends."""
        self._end_lease(session, node)
        del session.end_nodes[node], session.release_numbers[node]
        _refs(node).sessions.discard(session)
        self._drop_refs(node, True, False, False)

    def _move_end_up(self, session: RadixSession, node: Node, parent: Node) -> None:
        if parent.parent is None or session in _refs(parent).sessions:
            self._remove_end(session, node)
            return
        deadline = session.end_nodes.pop(node)
        kind = (False, False) if deadline is None else _kind(session)
        session.end_nodes[parent] = deadline
        session.release_numbers[parent] = session.release_numbers.pop(node)
        _refs(parent).sessions.add(session)
        self._add_refs(parent, True, *kind)
        if deadline is not None:
            self._leases_of(session).by_deadline[deadline] = (session, parent)
        _refs(node).sessions.discard(session)
        self._drop_refs(node, True, *kind)

    def _add_refs(self, node: Node, is_open: bool, is_leased: bool, is_retained: bool) -> None:
        """Count a reference in `node` and, where it is the first of its kind there, above it."""
        for ancestor in path(node):
            refs = ancestor.retention or _refs(ancestor)
            if is_open:
                refs.num_open += 1
                is_open = refs.num_open == 1
                refs.is_superseded = False
            if is_leased:
                refs.num_leased += 1
                is_leased = refs.num_leased == 1
                if is_leased:
                    self._leased.num_pages += len(ancestor.pages)
            if is_retained:
                refs.num_retained += 1
                is_retained = refs.num_retained == 1
                if is_retained:
                    self._retained.num_pages += len(ancestor.pages)
            if not (is_open or is_leased or is_retained):
                return

    def _drop_refs(self, node: Node, is_open: bool, is_leased: bool, is_retained: bool) -> None:
        """Undo one `_add_refs`; nodes whose class changes are moved, deepest first."""
        for ancestor in path(node):
            refs = ancestor.retention or _refs(ancestor)
            if is_leased:
                refs.num_leased -= 1
                is_leased = not refs.num_leased
                if is_leased:
                    self._leased.num_pages -= len(ancestor.pages)
                    if self._leased.unchoose(ancestor):
                        self._expired[ancestor] = None
            if is_retained:
                refs.num_retained -= 1
                is_retained = not refs.num_retained
                if is_retained:
                    self._retained.num_pages -= len(ancestor.pages)
                    if self._retained.unchoose(ancestor):
                        (self._leased.chosen if refs.num_leased else self._expired)[ancestor] = None
            if is_open:
                refs.num_open -= 1
                is_open = not refs.num_open
                if is_open:
                    self._reclassify(ancestor)
            if not (is_open or is_leased or is_retained):
                return

    def _reclassify(self, node: Node) -> None:
        """Move `node` to its class: it lost its last open session, was used without a session, or
        was demoted."""
        refs = _refs(node)
        if refs.num_open:
            return
        if refs.used_without_session:
            node.retention = None
        elif not node.lock_ref and not node.namespace.is_dead and node not in self._closed:
            self._policy.discard(node)
            self._expired.pop(node, None)
            self._closed[node] = None

    # -- leases -------------------------------------------------------------------------------

    def _leases_of(self, session: RadixSession) -> Leases:
        return self._leased if session.retain_until is None else self._retained

    def _begin_lease(self, session: RadixSession, node: Node) -> None:
        """Begin a lease at `node`. A path that exceeds the limit of all leases gets none unless
        the session retains: it would only end the other leases."""
        end = session.retain_until
        if end is None:
            if sum(len(ancestor.pages) for ancestor in path(node)) > self._max_leased:
                return
            end = self._clock() + session.lease_s
        self._num_leases += 1
        deadline = session.end_nodes[node] = (end, self._num_leases)
        self._leases_of(session).begin(deadline, session, node)
        self._add_refs(node, False, *_kind(session))
        self.end_leases()

    def _end_lease(self, session: RadixSession, node: Node) -> None:
        deadline = session.end_nodes[node]
        if deadline is not None:
            self._leases_of(session).end(deadline)
            session.end_nodes[node] = None
            self._drop_refs(node, False, *_kind(session))

    def end_leases(self) -> None:
        """End expired leases, then the oldest ones while leased pages exceed the limit."""
        leased, retained = self._leased, self._retained
        if not leased.by_deadline and not retained.by_deadline:
            return
        now = self._clock()
        while (first := leased.first_expired(now)) is not None:
            self._end_lease(*first)
        while (first := retained.first_expired(now)) is not None:
            self._end_lease(*first)
        while leased.num_pages > self._max_leased and (oldest := leased.oldest()) is not None:
            self._end_lease(*oldest)


def _left_behind(
    session: RadixSession, match: Match, prompt: memoryview, num_releases: int
) -> tuple[int, list[Node]]:
    """Returns the end nodes of a session that share most tokens with a prompt, which continues
    none, and the number of these tokens. Only of sequences that ended by that number of releases.
    """
    length, last, _, _ = match
    matched = set(path(last))
    most, ends = 0, list[Node]()
    for end in session.end_nodes:
        shared = next((node for node in path(end) if node in matched), None)
        if shared is None:
            continue
        common = min(length, shared.end)
        if common == len(prompt) - 1:  # a prompt's last token is not looked for
            common += _tokens_after(end, common)[:TOKEN_BYTES] == prompt[common:].tobytes()
        if common >= end.end:
            return 0, []
        if session.release_numbers[end] <= num_releases and common >= most:
            ends = [*ends, end] if common == most else [end]
            most = common
    return most, ends


def _tokens_after(end: Node, position: int) -> bytes:
    """Returns the first tokens (int32 bytes) after a position on the path to `end`, which is
    deeper."""
    edges, size = [], NUM_COMPARED * TOKEN_BYTES
    for node in path(end):
        if node.end <= position:
            break
        start = max(0, position - node.start) * TOKEN_BYTES
        edges.append(bytes(node.tokens[start : start + size]))
    return b"".join(reversed(edges))[:size]


def _is_superseded(node: Node) -> bool:
    return node.retention is not None and node.retention.is_superseded


def _kind(session: RadixSession) -> tuple[bool, bool]:
    """Whether its leases count among a node's leased references, and among its retained ones."""
    retains = session.retain_until is not None
    return not retains, retains


def _refs(node: Node) -> SessionRefs:
    """Returns the node's refs; creates them as used without a session if it has none."""
    refs: SessionRefs | None = node.retention
    if refs is None:
        refs = node.retention = SessionRefs(used_without_session=True)
    return refs


def _check_refs(retention: SessionRetention, nodes: list[Node]) -> None:
    """Refs follow from the sessions' end nodes and leases, and rise towards the root."""

    def count(some: list[Node]) -> int:
        return sum(len(node.pages) for node in some)

    num_retained = retention.num_retained_pages  # ends leases whose time is over
    all_refs = [(node, node.retention) for node in nodes if node.retention is not None]
    leased = [node for node, refs in all_refs if refs.num_leased]
    assert retention.num_leased_pages == count(leased), "leased pages miscounted"
    retained = [node for node, refs in all_refs if refs.num_retained]
    assert num_retained == count(retained), "retained pages miscounted"
    for node in nodes:
        name, refs = f"node {node.node_id}", node.retention
        if node.namespace.is_dead:
            is_kept = refs is not None and (refs.num_open or refs.num_leased or refs.num_retained)
            assert not is_kept, f"{name} of a namespace that was reset is still reached or leased"
            continue
        below = [child.retention for child in node.children.values()]
        ends = [session for session in retention.open_sessions if node in session.end_nodes]
        kept = [
            session.retain_until is not None
            for session in ends
            if session.end_nodes[node] is not None
        ]
        num_open = len(ends) + sum(1 for child in below if child and child.num_open)
        num_leased = kept.count(False) + sum(1 for child in below if child and child.num_leased)
        num_retained = kept.count(True)
        num_retained += sum(1 for child in below if child and child.num_retained)
        has_used_without_session = any(
            child is None or child.used_without_session for child in below
        )
        if refs is None:
            assert not num_open, f"{name} is reached by sessions and does not know it"
            continue
        assert refs.num_open == num_open, f"{name}: {refs.num_open} session refs, not {num_open}"
        assert refs.num_leased == num_leased, f"{name}: wrong number of leases"
        assert refs.num_retained == num_retained, f"{name}: wrong number of retaining sessions"
        num_kept = max(refs.num_leased, refs.num_retained)
        assert num_kept <= refs.num_open, f"{name} is leased and reached by no session"
        assert refs.used_without_session or not has_used_without_session or node.lock_ref, (
            f"{name} has children that were used without a session"
        )
