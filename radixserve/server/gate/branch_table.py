"""`BranchTable`: the open branches of clients by id, until they are closed or their leases end."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixserve.api.branch import Branch
from radixserve.cache.namespace import as_namespace
from radixserve.server.gate.session_table import InFlight, SessionTable
from radixserve.server.wire.errors import ApiError

MAX_TOKENS = 16_777_216  # of all branches of one tenant: 64 MiB of token ids


@dataclass(slots=True)
class OpenBranch:
    """A branch that a client has opened and not closed.

    id         the client's name of it
    name       its key in the table: the namespace and the id
    parent_id  id of the branch that it was forked from; None for a root
    created    Unix time in seconds
    length     its tokens as they were last counted against the tenant's bound
    """

    id: str
    name: str
    branch: Branch
    parent_id: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    length: int = 0


class BranchTable:
    """Open branches by id, with leases like those of sessions. Owned by the event loop.

    When a tenant has more than `max_branches` open, or more than MAX_TOKENS in all of them, its own
    least recently used branch is closed.
    """

    def __init__(self, lease_s: float, max_branches: int) -> None:
        """`lease_s`: seconds that a branch stays open after its last use. `max_branches`: per
        tenant; 0: branches cannot be opened."""
        self._leases = SessionTable(lease_s, max_branches, self._release)
        self._max_branches = max_branches
        self._open: dict[str, OpenBranch] = {}  # by name
        self._num_tokens: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._open)

    def add(self, branches: Sequence[Branch], parent_id: str | None = None) -> list[OpenBranch]:
        """Open `branches` under new ids. Raises ApiError 400 if they are more than a tenant may
        have open."""
        if len(branches) > self._max_branches:
            raise ApiError(
                400,
                f"{len(branches)} branches are more than a tenant may hold: {self._max_branches} "
                "(max_conversations)",
                param="n",
            )
        return [self._add(branch, parent_id) for branch in branches]

    def find(self, namespace: str, branch_id: str) -> OpenBranch:
        """The open branch with this id; renews its lease. Raises ApiError 404 if the namespace does
        not have it."""
        opened = self._open.get(self._leases.name(namespace, branch_id))
        if opened is None:
            raise ApiError(404, "no such branch is open", param="branch_id")
        self._leases.use(namespace, branch_id)
        return opened

    def note_length(self, opened: OpenBranch) -> None:
        """Count the tokens of a branch whose length has changed."""
        if opened.name not in self._open:  # closed meanwhile
            return
        tenant = as_namespace(opened.branch.namespace).tenant
        self._num_tokens[tenant] += opened.branch.length - opened.length
        opened.length = opened.branch.length
        while self._num_tokens[tenant] > MAX_TOKENS:
            oldest = self._leases.oldest(tenant)
            if oldest in (None, opened.name):
                return
            self._leases.close_named(oldest)

    def close(self, namespace: str, branch_id: str) -> bool:
        """Close a branch and release its K/V. Returns False if it is not open."""
        return self._leases.close(namespace, branch_id)

    def close_expired(self) -> None:
        """Close branches whose leases have ended. O(branches that are closed)."""
        self._leases.close_expired()

    def begin(self, opened: OpenBranch, generation: InFlight) -> None:
        """A request of the branch starts: its lease does not end before `finish`."""
        self._leases.begin(opened.name, generation, supersedes=False)

    def finish(self, opened: OpenBranch, generation: InFlight) -> None:
        """A request of the branch has ended."""
        self._leases.finish(opened.name, generation)
        self.note_length(opened)

    def _add(self, branch: Branch, parent_id: str | None) -> OpenBranch:
        branch_id = f"branch_{uuid.uuid4().hex}"
        name = self._leases.name(branch.namespace, branch_id)
        opened = self._open[name] = OpenBranch(branch_id, name, branch, parent_id)
        self._leases.use(branch.namespace, branch_id)
        self.note_length(opened)
        return opened

    def _release(self, name: str) -> None:
        opened = self._open.pop(name, None)
        if opened is None:
            return
        tenant = as_namespace(opened.branch.namespace).tenant
        self._num_tokens[tenant] -= opened.length
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]
        opened.branch.release()
