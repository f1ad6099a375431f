"""`Hints`: the pins and retains that callers were granted.

A retain is a session with a fixed end that claims a prefix: the prefix's pages are evicted after
all others. A pin is a retain that also locks the prefix. The owner's budget and a share of the pool
bound both. If a request cannot run otherwise, the oldest pin is unlocked and becomes a retain.
"""

from __future__ import annotations

from dataclasses import replace

from sortedcontainers import SortedDict

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, CacheSession, PrefixCache
from radixserve.cache.namespace import is_within
from radixserve.hints.hint import Hint, HintAnswer, HintLimits, join_answers
from radixserve.hints.prefetches import Prefetches
from radixserve.hints.shared_prefixes import CrossNamespacePrefixes, begins_with
from radixserve.scheduler.extension import SchedulerExtension
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.sessions import Sessions

MAX_KEPT = 4096  # pins and retains at a time
MAX_KEPT_OF_OWNER = 1024
_TRIES = 3  # to fit a hint into the budgets: one cut suffices unless other hints hold the cut part
_NO_WHOLE_PAGES = "no cached page boundary can be resumed"
_NOT_KEPT = 'hints need cache="radix"'


class GrantedHint:
    """A pin or a retain that was granted."""

    __slots__ = ("end", "hint", "number", "sequence", "session", "tokens")

    def __init__(self, number: int, hint: Hint, tokens: IntArray, end: float) -> None:
        self.number = number
        self.hint = hint
        self.tokens = tokens  # the covered prefix, whole pages
        self.end = end  # on the cache's clock
        self.session: CacheSession | None = None  # while it claims pages
        self.sequence: CacheSequence | None = None  # the lock of a pin

    @property
    def is_pin(self) -> bool:
        return self.sequence is not None

    @property
    def hinted_ids(self) -> IntArray:
        """The prefix as the hint named it."""
        assert self.hint.token_ids is not None
        return self.hint.token_ids


class Hints(SchedulerExtension):
    """The granted pins and retains, oldest first, and the shared prefixes."""

    def __init__(
        self,
        cache: PrefixCache,
        sessions: Sessions,
        limits: HintLimits,
        prefetches: Prefetches | None = None,
    ) -> None:
        """`prefetches`: are counted in `stats`, and end before a pin is unlocked."""
        self._cache = cache
        self._sessions = sessions
        self._prefetches = prefetches
        self.shared = CrossNamespacePrefixes(cache)
        self._limits = limits
        self._kept: dict[int, GrantedHint] = {}  # by number
        self.by_end: SortedDict = SortedDict()  # (end, number) -> GrantedHint
        self._by_owner: dict[str, dict[int, GrantedHint]] = {}
        self._pins: dict[int, GrantedHint] = {}
        self._num_granted = 0
        self.num_broken = 0  # pins unlocked for a request

    def __len__(self) -> int:
        return len(self._kept)

    def stats(self) -> dict[str, int]:
        """hints: pins and retains now. broken_pins: pins that were unlocked early for a request,
        since the start. shared_prefixes: prefixes that other namespaces may copy. shared_tokens:
        tokens copied from them. prefetches: that have not ended."""
        self.expire()
        return {
            "hints": len(self),
            "broken_pins": self.num_broken,
            "shared_prefixes": len(self.shared),
            "shared_tokens": self.shared.copied_tokens,
            "prefetches": 0 if self._prefetches is None else len(self._prefetches),
        }

    def held(self, owner: str) -> dict[str, int]:
        """The numbers of an owner's pins and retains, and of the tokens that they hold. O(nodes
        that they hold)."""
        self.expire()
        mine = self._by_owner.get(owner, {}).values()
        sessions = [granted.session for granted in mine if granted.session is not None]
        return {
            "pins": sum(granted.is_pin for granted in mine),
            "retains": sum(not granted.is_pin for granted in mine),
            "held_tokens": self._cache.held_tokens(sessions) if sessions else 0,
        }

    def apply(self, hint: Hint) -> HintAnswer:
        """Apply a hint other than prefetch. O(prefix), and for a pin or retain also O(nodes that
        its owner holds)."""
        if not self._cache.keeps_sessions:
            return HintAnswer(hint.verb, "rejected", reason=_NOT_KEPT)
        self.expire()
        if hint.token_ids is not None:
            return self._apply_to(hint, hint.token_ids)
        session = self._sessions.find(hint.session)
        if session is None:
            return HintAnswer(hint.verb, "missing", reason="no session of that name is open")
        if hint.verb == "share":
            return HintAnswer(hint.verb, "rejected", reason="share takes a prefix, not a session")
        prefixes = [
            (replace(hint, namespace=namespace, token_ids=tokens), tokens)
            for namespace, tokens in self._cache.session_prefixes(session)
        ]
        if hint.verb == "demote":
            for prefix_hint, tokens in prefixes:
                self._end_below(prefix_hint, tokens, ("pin", "retain"))
            num_held = self._cache.held_tokens([session])
            covered = self._cache.demote_session(session)
            self._sessions.close(hint.session)
            return HintAnswer(hint.verb, "accepted", num_held, covered)
        if not prefixes:
            return HintAnswer(hint.verb, "missing", reason="the session has nothing in the cache")
        answers = [self._apply_to(prefix_hint, tokens) for prefix_hint, tokens in prefixes]
        return join_answers(hint.verb, answers)

    def _apply_to(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """`apply` a hint to a prefix, `tokens`."""
        if hint.verb == "demote":
            return self._demote(hint, tokens)
        if hint.seconds == 0.0:
            return self._release(hint, tokens)
        tokens = tokens[: hint.max_tokens]
        num_cached, size = self._cached_len(hint, tokens), self._cache.page_size
        whole = self._usable_pages(hint, tokens[:num_cached])
        if not whole:
            reason = (
                "nothing of it is cached" if not num_cached else "less than a page of it is cached"
            )
            if num_cached >= size:
                reason = _NO_WHOLE_PAGES
            return HintAnswer(hint.verb, "missing", num_cached, reason=reason)
        reason = ""
        if whole < len(tokens) - len(tokens) % size:
            reason = f"only {num_cached} of {len(tokens)} tokens are cached"
            if whole < num_cached - num_cached % size:
                reason = f"only {whole} of {num_cached} cached tokens can be resumed, whole pages"
        if hint.verb == "share":
            return self.shared.add(hint, tokens[:whole], num_cached, reason)
        return self._keep(hint, tokens[:whole], num_cached, reason)

    def _usable_pages(self, hint: Hint, tokens: IntArray) -> int:
        """The number of cached `tokens` after which requests can continue, whole pages: fewer than
        all if the K/V of layers with windows, or a state, is missing at their end."""
        whole, size = len(tokens), self._cache.page_size
        while whole := whole - whole % size:
            usable = self._cached_len(hint, tokens[:whole])
            if usable == whole:
                break
            whole = usable
        return whole

    def _cached_len(self, hint: Hint, tokens: IntArray) -> int:
        lookup = self._cache.lookup(
            tokens, hint.namespace, allow_full=True, compare_namespaces=False
        )
        return lookup.cached_len

    # -- pin and retain -----------------------------------------------------------------------

    def _keep(self, hint: Hint, tokens: IntArray, num_cached: int, reason: str) -> HintAnswer:
        limits, wanted, now = self._limits, hint.seconds, self._cache.time()
        seconds = min(limits.seconds if wanted is None else wanted, limits.max_seconds)
        if wanted is not None and seconds < wanted:
            reason = f"{seconds:g} seconds are the most"
        self._num_granted += 1
        kept = GrantedHint(self._num_granted, hint, tokens.copy(), now + seconds)
        if not seconds:
            return HintAnswer(hint.verb, "rejected", num_cached, reason="max_hint_seconds is 0")
        self._supersede(kept)
        num_own = len(self._by_owner.get(hint.owner, ()))
        if len(self._kept) >= MAX_KEPT or num_own >= MAX_KEPT_OF_OWNER:
            return HintAnswer(
                hint.verb, "rejected", num_cached, reason=f"{num_own} hints are held already"
            )
        for _ in range(_TRIES):
            over = self._claim(kept)
            if not over:
                break
            self._end_claim(kept)
            reason = self._over_limit_reason(hint)
            fitting = kept.tokens[: max(0, len(kept.tokens) - over)]
            kept.tokens = fitting[: self._usable_pages(hint, fitting)]
            if not len(kept.tokens):
                return HintAnswer(hint.verb, "rejected", num_cached, reason=reason)
        else:
            return HintAnswer(hint.verb, "rejected", num_cached, reason=reason)
        if hint.verb == "pin":
            assert kept.session is not None
            kept.sequence = self._cache.pin(kept.tokens, hint.namespace, session=kept.session)
            self._pins[kept.number] = kept
        self._kept[kept.number] = self.by_end[kept.end, kept.number] = kept
        self.is_due = True
        self._by_owner.setdefault(hint.owner, {})[kept.number] = kept
        answer = "clipped" if reason else "accepted"
        return HintAnswer(hint.verb, answer, num_cached, len(kept.tokens), seconds, reason)

    def _claim(self, kept: GrantedHint) -> int:
        """Let a new retaining session claim the prefix. Returns the tokens beyond the budgets."""
        cache, hint = self._cache, kept.hint
        until = kept.end
        session = kept.session = cache.open_session(hint.verb, lease_s=0.0, retain_until=until)
        cache.acquire(kept.tokens, hint.namespace, allow_full=True, session=session).release()
        most = int(cache.num_pages * self._limits.max_share)
        over = (cache.num_retained - most) * cache.page_size
        if hint.budget_tokens is not None:
            others = self._by_owner.get(hint.owner, {}).values()
            sessions = [granted.session for granted in others if granted.session is not None]
            over = max(over, cache.held_tokens([*sessions, session]) - hint.budget_tokens)
        return max(0, over)

    def _supersede(self, kept: GrantedHint) -> None:
        """End the owner's older hints that the new one covers: those of the same prefix, and those
        of a shorter prefix that end no later and do not lock more."""
        for old in self._of_owner(kept.hint):
            if not begins_with(kept.tokens, old.tokens):
                continue
            is_same = len(old.tokens) == len(kept.tokens) and old.hint.verb == kept.hint.verb
            is_weaker = old.end <= kept.end and (not old.is_pin or kept.hint.verb == "pin")
            if is_same or is_weaker:
                self._end(old)

    def _release(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """Apply seconds=0: end the owner's hints of that verb for the prefix and for its
        continuations."""
        if hint.verb == "share":
            return self.shared.remove(hint, tokens)
        ended = self._end_below(hint, tokens, (hint.verb,))
        if not ended:
            return HintAnswer(hint.verb, "missing", reason=f"there is no {hint.verb} to end")
        return HintAnswer(hint.verb, "accepted", ended, ended, 0.0)

    def _end_below(self, hint: Hint, tokens: IntArray, verbs: tuple[str, ...]) -> int:
        """End the owner's hints of these verbs whose prefix begins with `tokens`. Returns the most
        tokens that one of them covered."""
        most = 0
        for old in self._of_owner(hint):
            if old.hint.verb in verbs and begins_with(old.hinted_ids, tokens):
                most = max(most, len(old.tokens))
                self._end(old)
        return most

    def _of_owner(self, hint: Hint) -> list[GrantedHint]:
        """The granted hints of the hint's owner in its namespace."""
        mine = self._by_owner.get(hint.owner, {}).values()
        return [granted for granted in mine if granted.hint.namespace == hint.namespace]

    def _demote(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        num_cached = self._cached_len(hint, tokens)
        if not num_cached:
            return HintAnswer(hint.verb, "missing", reason="nothing of it is cached")
        self._end_below(hint, tokens, ("pin", "retain"))
        covered = self._cache.demote(tokens, hint.namespace)
        if not covered:
            reason = "open sessions keep it, or other prefixes go on from it"
            return HintAnswer(hint.verb, "rejected", num_cached, reason=reason)
        return HintAnswer(hint.verb, "accepted", num_cached, covered)

    # -- for the scheduler ---------------------------------------------------------------------

    def begin_step(self) -> None:
        self.expire()

    def extend_prefix(self, sequence: CacheSequence, tokens: IntArray) -> int:
        return self.shared.copy_into(sequence, tokens)

    def make_room(self, state: RequestState | None) -> bool:
        """End the running prefetch or else unlock the oldest pin, where no request can continue."""
        if state is not None:
            return False
        return (self._prefetches is not None and self._prefetches.end_running()) or self.break_pin()

    # -- the end ------------------------------------------------------------------------------

    def expire(self) -> None:
        """End the pins and retains that have expired. O(1) when none has."""
        if not self.by_end:
            return
        now = self._cache.time()
        while self.by_end and self.by_end.keys()[0][0] <= now:
            self._end(self.by_end.peekitem(0)[1])

    def break_pin(self) -> bool:
        """Unlock the oldest pin, which stays a retain. False without a pin."""
        for number, kept in self._pins.items():
            assert kept.sequence is not None
            kept.sequence.release()
            kept.sequence = None
            del self._pins[number]
            self.num_broken += 1
            return True
        return False

    def forget(self, namespace: str | None) -> None:
        """End the hints of a namespace that was reset; None: of all namespaces."""
        for kept in list(self._kept.values()):
            if is_within(kept.hint.namespace, namespace):
                self._end(kept)
        self.shared.forget(namespace)

    def _end(self, kept: GrantedHint) -> None:
        del self._kept[kept.number], self.by_end[kept.end, kept.number]
        self.is_due = bool(self._kept)
        self._pins.pop(kept.number, None)
        of_owner = self._by_owner[kept.hint.owner]
        del of_owner[kept.number]
        if not of_owner:
            del self._by_owner[kept.hint.owner]
        self._end_claim(kept)

    def _end_claim(self, kept: GrantedHint) -> None:
        """Close the session, then unlock the prefix: pages without another session are then
        evicted first."""
        sequence, session = kept.sequence, kept.session
        kept.sequence = kept.session = None
        if session is not None:
            session.close()
        if sequence is not None:
            sequence.release()

    def _over_limit_reason(self, hint: Hint) -> str:
        budget = hint.budget_tokens
        own = "" if budget is None else f"the budget of {budget} tokens, or "
        share = f"the share of the pool that hints may hold ({self._limits.max_share:g})"
        return f"{own}{share} is full"

    def check(self) -> None:
        """Raise AssertionError unless the hints, their order and their locks agree. O(hints)."""
        kept, num_open = self._kept, self._cache.stats()["sessions"]
        assert len(self._sessions) + len(kept) <= num_open, "a closed session is kept"
        assert {(granted.end, n) for n, granted in kept.items()} == set(self.by_end), "hints' ends"
        owned = [n for some in self._by_owner.values() for n in some]
        assert sorted(owned) == sorted(kept), "hints of owners"
        assert set(self._pins) == {n for n, granted in kept.items() if granted.is_pin}, "pins"
        for granted in kept.values():
            is_open = granted.session is not None and granted.session.is_open
            assert is_open, f"hint {granted.number} is closed"
            assert granted.sequence is None or not granted.sequence.is_released, (
                "a pin is not locked"
            )
        self.shared.check()
