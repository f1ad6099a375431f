"""`RuntimeHints`: the methods of `Runtime` that steer what the cache keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from radixserve.api.arguments import check_type
from radixserve.api.client import RuntimeMethods
from radixserve.api.settings import ChatSettings, chat_options
from radixserve.checks import check_int, check_str, check_text, shown
from radixserve.errors import InvalidRequest
from radixserve.hints.hint import Hint, HintAnswer, check_hint
from radixserve.hints.messages import ApplyHints, GetHeld
from radixserve.reports import HeldByHints
from radixserve.text.prompts import Prompt


class RuntimeHints(RuntimeMethods):
    """Hints: how long the K/V of a prompt, or of a session, stays in the cache."""

    def hint(
        self,
        verb: str,
        prompt: Prompt | None = None,
        *,
        session: str = "",
        seconds: float | None = None,
        max_tokens: int | None = None,
        namespace: str = "",
        **chat: Unpack[ChatSettings],
    ) -> HintAnswer:
        """Steer how long the K/V of a prompt, or of a session, stays in the cache.

        retain    evict it after everything else, for `seconds`
        pin       the same, and locked: it makes way only for a request that fits in no other way
        demote    evict it first, with all that continues it; ends pins and retains of it
        prefetch  compute it while no other request is open
        share     let other namespaces copy it instead of computing it, while it is cached

        `seconds` is cut to the config's `max_hint_seconds`; 0 ends the hints of the same verb.
        `max_tokens`: apply the hint to so many of the prompt's first tokens only. `session`: a name
        given to `submit`, for retain, pin and demote; demote closes the session. Whole pages count.
        With cache="hash" all but prefetch are rejected, with cache="off" all are.

        O(prompt), for retain and pin also O(retained nodes). Only prefetch computes tokens. Raises
        InvalidRequest.
        """
        made = self._hint(verb, prompt, session, seconds, max_tokens, namespace, chat)
        return self.apply_hints([made])[0]

    async def ahint(
        self,
        verb: str,
        prompt: Prompt | None = None,
        *,
        session: str = "",
        seconds: float | None = None,
        max_tokens: int | None = None,
        namespace: str = "",
        **chat: Unpack[ChatSettings],
    ) -> HintAnswer:
        """`hint` for asyncio."""
        made = self._hint(verb, prompt, session, seconds, max_tokens, namespace, chat)
        return (await self.aapply_hints([made]))[0]

    def apply_hints(self, hints: Sequence[Hint]) -> list[HintAnswer]:
        """Apply several hints between two steps of the engine. Returns one answer per hint, in
        order. Their token ids are those of `tokenize`; an owner's budget counts all hints that it
        was granted."""
        self._client.core.check_alive()
        return self._client.core.call(ApplyHints(self._checked_hints(hints)))

    async def aapply_hints(self, hints: Sequence[Hint]) -> list[HintAnswer]:
        """`apply_hints` for asyncio."""
        self._client.core.check_alive()
        reply = self._client.core.ask(ApplyHints(self._checked_hints(hints)))
        return await asyncio.wrap_future(reply)

    def held_by_hints(self, owner: str = "") -> HeldByHints:
        """Returns {"pins", "retains", "held_tokens"} of an owner now. "held_tokens" are the cached
        tokens that its pins and retains keep; a token that two of them keep counts once."""
        self._client.core.check_alive()
        return self._client.core.call(GetHeld(check_str("owner", owner)))

    # -- inside -------------------------------------------------------------------------------

    def _hint(
        self,
        verb: str,
        prompt: Prompt | None,
        session: str,
        seconds: float | None,
        max_tokens: int | None,
        namespace: str,
        chat: ChatSettings,
    ) -> Hint:
        self._client.core.check_alive()
        options = chat_options(chat)
        ids = None if prompt is None else self._client.reader.read(prompt, options=options)
        return Hint(verb, ids, session, namespace, seconds, max_tokens)

    def _checked_hints(self, hints: object) -> tuple[Hint, ...]:
        """Returns checked copies of hints. Raises InvalidRequest."""
        if not isinstance(hints, Iterable):
            raise InvalidRequest(f"hints must be a list of Hints, got {shown(hints)}")
        return tuple(map(self._checked, hints))

    def _checked(self, hint: object) -> Hint:
        hint = check_type("a hint", hint, Hint)
        check_hint(hint.verb, hint.seconds, hint.max_tokens)
        check_text("namespace", hint.namespace)
        check_str("owner", hint.owner)
        if hint.budget_tokens is not None:
            check_int("budget_tokens", hint.budget_tokens, 0)
        ids = hint.token_ids
        if (ids is None) == (not check_str("session", hint.session)):
            raise InvalidRequest("a hint takes a prompt or a session, one of the two")
        seconds = None if hint.seconds is None else float(hint.seconds)
        if ids is not None:
            ids = self._client.reader.read(ids)
        return replace(hint, token_ids=ids, seconds=seconds)
