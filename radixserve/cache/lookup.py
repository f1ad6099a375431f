"""`Lookup`: how much of a prompt is cached, and the reason why not more."""

from __future__ import annotations

from typing import Literal, NamedTuple

MissReason = Literal[
    "full",
    "diverged",
    "date",
    "picture",
    "evicted",
    "epoch",
    "adapter",
    "namespace",
    "no_checkpoint",
    "window_evicted",
    "never_seen",
]


# Tokens that were cached, for this namespace or another one, and cannot be used now.
LOST_REASONS = ("evicted", "epoch", "adapter", "namespace", "no_checkpoint", "window_evicted")


class StoredLookup(NamedTuple):
    """How much of a prompt is in the kv_store, and what loading it costs. Seconds are estimates by
    the rates measured since the start."""

    stored_len: int  # leading tokens that are stored, cached or not
    load_tokens: int  # of these: neither cached nor the prompt's last token
    load_s: float  # seconds to load `load_tokens`
    compute_s: float | None  # seconds to compute them; None before any prompt was computed
    host_len: int = 0  # of stored_len: in runs that lie in host memory


class Lookup(NamedTuple):
    """How much of a prompt is cached, and why not more.

    reason is one of
      full        all tokens that may be reused are cached
      diverged    cached sequences continue with another token at `position`
      date        the same, inside the date or time that the chat template prints; of chat messages
      picture     the same, where both tokens are of pictures: the prompt has another picture there
      evicted     the next tokens were cached and have been evicted
      epoch       more of these tokens was computed with other weights, and is cached
      adapter     more of these tokens is cached of another adapter, or of the model alone
      namespace   another namespace has more of these tokens cached
      no_checkpoint  K/V is cached up to `position`, but the deepest recurrent state kept for it is
                  after cached_len tokens; models with recurrent layers only
      window_evicted  K/V is cached up to `position`, but its window pages were dropped; models with
                  sliding-window layers only
      never_seen  no cached or remembered sequence continues from here

    If no page is free for the copy of a page's first tokens, cached_len is less than position by a
    part of a page. A bounded number of evictions is remembered, until a reset.
    """

    cached_len: int  # tokens that acquire() would reuse now
    reason: MissReason
    position: int  # first position of the prompt that does not match cached tokens
    expected: int | None = None  # for diverged, date and picture: a token cached at that position
    found: int | None = None  # for diverged, date and picture: the prompt's token there
    stored: StoredLookup | None = None  # of an engine with a kv_store

    @property
    def missing_state_tokens(self) -> int:
        """Tokens that acquire() would compute again although their K/V is cached, because no
        recurrent state or window pages to resume from are kept after them."""
        lacks_state = self.reason in ("no_checkpoint", "window_evicted")
        return self.position - self.cached_len if lacks_state else 0
