"""Messages to an engine, answered by the replicas that they concern."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from radixserve.cluster.replica_link import ReplicaLink
from radixserve.cluster.router import Router
from radixserve.cluster.stats import add_stats
from radixserve.engine import messages
from radixserve.engine.messages import Message
from radixserve.errors import EngineDead
from radixserve.hint import HintAnswer

Links = Mapping[str, ReplicaLink]  # replicas that report, by name


async def handle_message(message: Message[Any], links: Links, router: Router) -> Any:
    """As of one engine. Raises EngineDead without a replica."""
    match message:
        case messages.GetStats() | messages.GetHeld():
            return add_stats(await _ask_all(message, links))
        case messages.LookUpPrompt(token_ids, namespace):
            return await _ask_one(message, links, router.best(token_ids, namespace))
        case messages.ClaimSessions(claims):
            for claim in claims:
                name = router.of_session(claim.name)
                await _ask_one(messages.ClaimSessions((claim,)), links, name)
        case messages.ApplyHints(hints):
            return [await _hint(messages.ApplyHints((hint,)), links, router) for hint in hints]
        case messages.CloseSession(name):
            router.close_session(name)
            await _ask_all(message, links)
        case messages.ResetCache() | messages.CheckCache():
            await _ask_all(message, links)
        case _:  # dumps, snapshots, previews: of one of them
            return await _ask_one(message, links, None)
    return None


async def _hint(message: messages.ApplyHints, links: Links, router: Router) -> HintAnswer:
    (hint,) = message.hints
    if hint.token_ids is None:
        name = router.of_session(hint.session)
    else:
        name = router.best(hint.token_ids, hint.namespace)
    (found,) = await _ask_one(message, links, name)
    return found


async def _ask_all(message: Message[Any], links: Links) -> list[Any]:
    return await asyncio.gather(*(link.call(message) for link in links.values()))


async def _ask_one(message: Message[Any], links: Links, name: str | None) -> Any:
    """The replica of that name, or where it is None any of them."""
    if not links:
        raise EngineDead("there is no replica")
    link = links.get(name or "") or links[min(links)]
    return await link.call(message)
