"""`Hints`: pins, retains and demotions that callers ask for, on the cache's own sessions.

A retain is a session that retains until a fixed time and claims a prefix: its pages are evicted
after everything else. A pin is the same and besides holds the prefix locked. Both are bounded by
their owner's budget and by a share of the pool. Where nothing else lets a request go on, the oldest
pin is unlocked and stays a retain.
"""

from __future__ import annotations

from dataclasses import replace

from sortedcontainers import SortedDict

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, CacheSession, PrefixCache
from radixserve.hint import Hint, HintAnswer, HintLimits, join_answers
from radixserve.scheduler.cross_namespace_prefixes import CrossNamespacePrefixes, begins_with
from radixserve.scheduler.sessions import Sessions

MAX_KEPT = 4096  # pins and retains at a time
MAX_KEPT_OF_OWNER = 1024
_TRIES = 3  # to fit one into the budgets: cut once, unless others hold what was cut
_NO_WHOLE_PAGES = "after whole pages, requests can go on from none of it"
_NOT_KEPT = 'what is evicted follows no hint here: cache="radix" is needed'


class GrantedHint:
    """A pin or a retain that was granted."""

    __slots__ = ("end", "hint", "number", "sequence", "session", "tokens")

    def __init__(self, number: int, hint: Hint, tokens: IntArray, end: float) -> None:
        self.number = number
        self.hint = hint
        self.tokens = tokens  # what it covers, in whole pages
        self.end = end  # on the cache's clock
        self.session: CacheSession | None = None  # while it holds something
        self.sequence: CacheSequence | None = None  # the lock of a pin

    @property
    def is_pin(self) -> bool:
        return self.sequence is not None

    @property
    def asked(self) -> IntArray:
        """The prefix as the hint named it."""
        assert self.hint.token_ids is not None
        return self.hint.token_ids


class Hints:
    """All that was granted, oldest first. Only the scheduler calls it."""

    def __init__(self, cache: PrefixCache, sessions: Sessions, limits: HintLimits) -> None:
        self._cache = cache
        self._sessions = sessions
        self.shared = CrossNamespacePrefixes(cache)
        self._limits = limits
        self._kept: dict[int, GrantedHint] = {}  # by number
        self._by_end: SortedDict = SortedDict()  # (end, number) -> GrantedHint
        self._by_owner: dict[str, dict[int, GrantedHint]] = {}
        self._pins: dict[int, GrantedHint] = {}
        self._num_granted = 0
        self.num_broken = 0  # pins unlocked for a request

    def __len__(self) -> int:
        return len(self._kept)

    def stats(self) -> dict[str, int]:
        """hints: pins and retains now; broken_pins: unlocked before their time for a request, since
        the start; shared_prefixes: open to other namespaces; shared_tokens: copied from these."""
        self.expire()
        return {
            "hints": len(self),
            "broken_pins": self.num_broken,
            "shared_prefixes": len(self.shared),
            "shared_tokens": self.shared.copied_tokens,
        }

    def held(self, owner: str) -> dict[str, int]:
        """What an owner's pins and retains are and hold. O(nodes that they hold)."""
        self.expire()
        mine = self._by_owner.get(owner, {}).values()
        sessions = [one.session for one in mine if one.session is not None]
        return {
            "pins": sum(one.is_pin for one in mine),
            "retains": sum(not one.is_pin for one in mine),
            "held_tokens": self._cache.held_tokens(sessions) if sessions else 0,
        }

    def apply(self, hint: Hint) -> HintAnswer:
        """Carry out anything but prefetch. O(prefix) and, for a pin or retain, O(what its owner
        holds already)."""
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
        found = [
            (replace(hint, namespace=namespace, token_ids=tokens), tokens)
            for namespace, tokens in self._cache.session_prefixes(session)
        ]
        if hint.verb == "demote":
            for one, tokens in found:
                self._end_below(one, tokens, ("pin", "retain"))
            num_held = self._cache.held_tokens([session])
            covered = self._cache.demote_session(session)
            self._sessions.close(hint.session)
            return HintAnswer(hint.verb, "accepted", num_held, covered)
        if not found:
            return HintAnswer(hint.verb, "missing", reason="the session has nothing in the cache")
        answers = [self._apply_to(one, tokens) for one, tokens in found]
        return join_answers(hint.verb, answers)

    def _apply_to(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """`tokens`: those of the hint."""
        if hint.verb == "demote":
            return self._demote(hint, tokens)
        if hint.seconds == 0.0:
            return self._release(hint, tokens)
        tokens = tokens[: hint.max_tokens]
        found, size = self._cached_len(hint, tokens), self._cache.page_size
        whole = self._usable_pages(hint, tokens[:found])
        if not whole:
            reason = "nothing of it is cached" if not found else "less than a page of it is cached"
            if found >= size:
                reason = _NO_WHOLE_PAGES
            return HintAnswer(hint.verb, "missing", found, reason=reason)
        reason = ""
        if whole < len(tokens) - len(tokens) % size:
            reason = f"only {found} of {len(tokens)} tokens are cached"
            if whole < found - found % size:
                reason = f"after whole pages, requests can go on from {whole} of {found} tokens"
        if hint.verb == "share":
            return self.shared.add(hint, tokens[:whole], found, reason)
        return self._keep(hint, tokens[:whole], found, reason)

    def _usable_pages(self, hint: Hint, tokens: IntArray) -> int:
        """How many of `tokens`, which are cached, are in whole pages that requests can go on from:
        fewer where K/V of layers with windows, or states, are missing at the last one's end."""
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

    def _keep(self, hint: Hint, tokens: IntArray, found: int, reason: str) -> HintAnswer:
        limits, wanted, now = self._limits, hint.seconds, self._cache.time()
        seconds = min(limits.seconds if wanted is None else wanted, limits.max_seconds)
        if wanted is not None and seconds < wanted:
            reason = f"{seconds:g} seconds are the most"
        self._num_granted += 1
        kept = GrantedHint(self._num_granted, hint, tokens.copy(), now + seconds)
        if not seconds:
            return HintAnswer(hint.verb, "rejected", found, reason="max_hint_seconds is 0")
        self._supersede(kept)
        num_own = len(self._by_owner.get(hint.owner, ()))
        if len(self._kept) >= MAX_KEPT or num_own >= MAX_KEPT_OF_OWNER:
            return HintAnswer(
                hint.verb, "rejected", found, reason=f"{num_own} hints are held already"
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
                return HintAnswer(hint.verb, "rejected", found, reason=reason)
        else:
            return HintAnswer(hint.verb, "rejected", found, reason=reason)
        if hint.verb == "pin":
            assert kept.session is not None
            kept.sequence = self._cache.pin(kept.tokens, hint.namespace, session=kept.session)
            self._pins[kept.number] = kept
        self._kept[kept.number] = self._by_end[kept.end, kept.number] = kept
        self._by_owner.setdefault(hint.owner, {})[kept.number] = kept
        answer = "clipped" if reason else "accepted"
        return HintAnswer(hint.verb, answer, found, len(kept.tokens), seconds, reason)

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
            sessions = [one.session for one in others if one.session is not None]
            over = max(over, cache.held_tokens([*sessions, session]) - hint.budget_tokens)
        return max(0, over)

    def _supersede(self, kept: GrantedHint) -> None:
        """End what the owner asked for before and the new hint covers: the same prefix, or a
        shorter one for no longer and no stronger."""
        for old in self._of_owner(kept.hint):
            if not begins_with(kept.tokens, old.tokens):
                continue
            is_same = len(old.tokens) == len(kept.tokens) and old.hint.verb == kept.hint.verb
            is_weaker = old.end <= kept.end and (not old.is_pin or kept.hint.verb == "pin")
            if is_same or is_weaker:
                self._end(old)

    def _release(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """seconds=0: end what the owner asked for by that verb, for the prefix and what goes on
        from it."""
        if hint.verb == "share":
            return self.shared.remove(hint, tokens)
        ended = self._end_below(hint, tokens, (hint.verb,))
        if not ended:
            return HintAnswer(hint.verb, "missing", reason=f"there is no {hint.verb} to end")
        return HintAnswer(hint.verb, "accepted", ended, ended, 0.0)

    def _end_below(self, hint: Hint, tokens: IntArray, verbs: tuple[str, ...]) -> int:
        """The most tokens of those that were ended."""
        most = 0
        for old in self._of_owner(hint):
            if old.hint.verb in verbs and begins_with(old.asked, tokens):
                most = max(most, len(old.tokens))
                self._end(old)
        return most

    def _of_owner(self, hint: Hint) -> list[GrantedHint]:
        """What the hint's owner was granted in its namespace."""
        mine = self._by_owner.get(hint.owner, {}).values()
        return [one for one in mine if one.hint.namespace == hint.namespace]

    def _demote(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        found = self._cached_len(hint, tokens)
        if not found:
            return HintAnswer(hint.verb, "missing", reason="nothing of it is cached")
        self._end_below(hint, tokens, ("pin", "retain"))
        covered = self._cache.demote(tokens, hint.namespace)
        if not covered:
            reason = "open sessions keep it, or other prefixes go on from it"
            return HintAnswer(hint.verb, "rejected", found, reason=reason)
        return HintAnswer(hint.verb, "accepted", found, covered)

    # -- the end ------------------------------------------------------------------------------

    def expire(self) -> None:
        """End those whose time is over. O(1) where there are none."""
        if not self._by_end:
            return
        now = self._cache.time()
        while self._by_end and self._by_end.keys()[0][0] <= now:
            self._end(self._by_end.peekitem(0)[1])

    def break_pin(self) -> bool:
        """Unlock the oldest pin, which stays a retain; False where there is none."""
        for number, kept in self._pins.items():
            assert kept.sequence is not None
            kept.sequence.release()
            kept.sequence = None
            del self._pins[number]
            self.num_broken += 1
            return True
        return False

    def forget(self, namespace: str | None) -> None:
        """A namespace was reset, or all."""
        for kept in list(self._kept.values()):
            if namespace in (None, kept.hint.namespace):
                self._end(kept)
        self.shared.forget(namespace)

    def _end(self, kept: GrantedHint) -> None:
        del self._kept[kept.number], self._by_end[kept.end, kept.number]
        self._pins.pop(kept.number, None)
        of_owner = self._by_owner[kept.hint.owner]
        del of_owner[kept.number]
        if not of_owner:
            del self._by_owner[kept.hint.owner]
        self._end_claim(kept)

    def _end_claim(self, kept: GrantedHint) -> None:
        """Unlock before the session is closed: what only it reached is evicted first from then."""
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

    def check(self, num_open: int) -> None:
        """AssertionError unless what is granted, its order and its locks agree. O(hints).
        `num_open`: sessions of the cache."""
        kept = self._kept
        assert len(self._sessions) + len(kept) <= num_open, "a closed session is kept"
        assert {(one.end, n) for n, one in kept.items()} == set(self._by_end), "hints' ends"
        owned = [n for some in self._by_owner.values() for n in some]
        assert sorted(owned) == sorted(kept), "hints of owners"
        assert set(self._pins) == {n for n, one in kept.items() if one.is_pin}, "pins"
        for one in kept.values():
            is_open = one.session is not None and one.session.is_open
            assert is_open, f"hint {one.number} is closed"
            assert one.sequence is None or not one.sequence.is_released, "a pin is not locked"
        self.shared.check()
