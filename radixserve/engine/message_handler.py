"""Messages to an engine, answered between two steps: which of its methods each one calls."""

from __future__ import annotations

from typing import Any

from radixserve.engine import messages
from radixserve.engine.engine import Engine
from radixserve.engine.messages import Message


def handle_message(engine: Engine, message: Message[Any]) -> Any:
    """Carry out every message that concerns the engine alone; those that add or end requests
    concern their callers too, see `EngineThread`. Raises what the engine raises."""
    match message:
        case messages.LookUpPrompt(token_ids, namespace, compare_namespaces):
            return engine.lookup(token_ids, namespace, compare_namespaces=compare_namespaces)
        case messages.GetStats():
            return engine.stats()
        case messages.DumpTree(max_nodes, namespace):
            return engine.tree(max_nodes, namespace)
        case messages.PreviewEviction(count):
            return engine.eviction_preview(count)
        case messages.TakeSnapshot(view):
            return engine.snapshot(view)
        case messages.TakeEvents(with_snapshot):
            return engine.take_events(with_snapshot=with_snapshot)
        case messages.ResetCache(namespace):
            return engine.reset_cache(namespace)
        case messages.GetHeld(owner):
            return engine.held_by_hints(owner)
        case messages.ApplyHints(hints):
            return [engine.hint(one) for one in hints]
        case messages.CheckCache():
            return engine.check()
        case messages.ClaimSessions(claims):
            for claim in claims:
                engine.claim(claim.name, claim.tokens, claim.namespace)
        case messages.CloseSession(name, successors, reopened):
            for claim in successors:
                engine.claim(claim.name, claim.tokens, claim.namespace)
            engine.close_session(name)
            if reopened is not None:
                engine.claim(name, reopened.tokens, reopened.namespace)
    return None
