"""Small traces made by hand or at random, and the shared ones where they are at hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radixserve.replay.trace import PackedTokens, Trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"
SHARED_NAMES = ("mooncake_conversation", "agentic_code", "tau_airline", "bbh_fewshot")

Turn = tuple[Sequence[int], Sequence[int]]  # prompt and output


def make_trace(
    turns: Sequence[Turn],
    *,
    times: Sequence[float] | None = None,
    sessions: Sequence[str | None] | None = None,
    namespaces: Sequence[str] | None = None,
) -> Trace:
    packed = PackedTokens()
    for prompt, output in turns:
        packed.add(np.asarray(prompt, np.int32), np.asarray(output, np.int32))
    return Trace(
        name="made",
        source=packed,
        times=np.asarray(times or [0.0] * len(turns)),
        sessions=sessions or [None] * len(turns),
        namespaces=namespaces or [""] * len(turns),
        num_prompt=np.asarray([len(prompt) for prompt, _ in turns], np.int64),
        num_output=np.asarray([len(output) for _, output in turns], np.int64),
        has_times=times is not None,
    )


def random_turns(
    rng: random.Random, count: int, *, longest: int, alphabet: int, fresh: bool
) -> list[Turn]:
    """Prompts that often begin like an earlier sequence.

    `fresh`: a prompt's last token and all output tokens were never seen before.
    """
    known: list[list[int]] = [[]]
    turns: list[Turn] = []
    unused = 1000
    for _ in range(count):
        head = rng.choice(known)
        prompt = head[: rng.randint(0, len(head))][: longest - 2]
        room = longest - 1 - len(prompt)
        prompt = prompt + [rng.randrange(alphabet) for _ in range(rng.randint(1, room))]
        output = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest - len(prompt)))]
        if fresh:
            prompt[-1] = unused
            output = list(range(unused + 1, unused + 1 + len(output)))
            unused += 1 + len(output)
        known.append(prompt + output)
        turns.append((prompt, output))
    return turns


def synthetic_trace(count: int = 300, seed: int = 0) -> Trace:
    """Conversations over a few system prompts, turns interleaved: in place of the shared ones."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 1000, size).tolist() for size in (40, 300, 120)]
    chats: list[list[int]] = []
    turns, sessions, times, now = [], [], [], 0.0
    for _ in range(count):
        if not chats or rng.random() < 0.25:
            chats.append(list(systems[rng.integers(len(systems))]))
        chat = len(chats) - 1 - int(rng.integers(min(len(chats), 12)))
        prompt = chats[chat] + rng.integers(0, 1000, rng.integers(1, 60)).tolist()
        output = rng.integers(0, 1000, rng.integers(1, 40)).tolist()
        chats[chat] = prompt + output
        now += float(rng.exponential(2.0))
        turns.append((prompt, output))
        sessions.append(f"chat {chat}")
        times.append(now)
    return make_trace(turns, times=times, sessions=sessions)
