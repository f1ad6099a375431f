"""`BranchTable`: branches that clients hold by their ids, until their leases end."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixserve.api.branch import Branch
from radixserve.request import tenant_of
from radixserve.server.gate.session_table import InFlight, SessionTable
from radixserve.server.wire.errors import ApiError

MAX_TOKENS = 16_777_216  # of all branches of one tenant: 64 MiB of token ids


@dataclass(slots=True)
class HeldBranch:
    """A branch that a client holds.

    name       in the table
    parent_id  of the branch that it was forked from; None for a root
    length     tokens that count against the tenant's bound
    """

    id: str
    name: str
    branch: Branch
    parent_id: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    length: int = 0


class BranchTable:
    """Branches by id, with the leases and the order of sessions. Owned by the event loop.

    A tenant that opens more than `max_branches`, or more than MAX_TOKENS in all of them, closes its
    own least recently used one, never another's.
    """

    def __init__(self, lease_s: float, max_branches: int) -> None:
        """`max_branches`: of each tenant; 0: there are none."""
        self._leases = SessionTable(lease_s, max_branches, self._release)
        self._max_branches = max_branches
        self._held: dict[str, HeldBranch] = {}  # by name
        self._num_tokens: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._held)

    def add(self, branches: Sequence[Branch], parent_id: str | None = None) -> list[HeldBranch]:
        """Hold new branches. Raises ApiError."""
        if len(branches) > self._max_branches:
            raise ApiError(
                400,
                f"{len(branches)} branches are more than a tenant may hold: {self._max_branches} "
                "(max_conversations)",
                param="n",
            )
        return [self._add(branch, parent_id) for branch in branches]

    def find(self, namespace: str, branch_id: str) -> HeldBranch:
        """The branch; renews its lease. ApiError 404 where none of this id is held in the
        namespace."""
        held = self._held.get(self._leases.name(namespace, branch_id))
        if held is None:
            raise ApiError(404, "no such branch is open", param="branch_id")
        self._leases.use(namespace, branch_id)
        return held

    def note_length(self, held: HeldBranch) -> None:
        """The branch was moved: count its tokens."""
        if held.name not in self._held:  # closed meanwhile
            return
        tenant = tenant_of(held.branch.namespace)
        self._num_tokens[tenant] += held.branch.length - held.length
        held.length = held.branch.length
        while self._num_tokens[tenant] > MAX_TOKENS:
            oldest = self._leases.oldest(tenant)
            if oldest in (None, held.name):
                return
            self._leases.close_named(oldest)

    def close(self, namespace: str, branch_id: str) -> bool:
        """Release it. False where it is not held."""
        return self._leases.close(namespace, branch_id)

    def close_expired(self) -> None:
        """O(expired ones)."""
        self._leases.close_expired()

    def begin(self, held: HeldBranch, generation: InFlight) -> None:
        """An answer begins; the lease lasts at least as long as it."""
        self._leases.begin(held.name, generation, supersedes=False)

    def finish(self, held: HeldBranch, generation: InFlight) -> None:
        self._leases.finish(held.name, generation)
        self.note_length(held)

    def _add(self, branch: Branch, parent_id: str | None) -> HeldBranch:
        branch_id = f"branch_{uuid.uuid4().hex}"
        name = self._leases.name(branch.namespace, branch_id)
        held = self._held[name] = HeldBranch(branch_id, name, branch, parent_id)
        self._leases.use(branch.namespace, branch_id)
        self.note_length(held)
        return held

    def _release(self, name: str) -> None:
        held = self._held.pop(name)
        tenant = tenant_of(held.branch.namespace)
        self._num_tokens[tenant] -= held.length
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]
        held.branch.release()
