"""What a choice of a replica costs, and the events of what the replicas cache.

    python benchmarks/bench_router.py [--edges N] [--replicas N] [--choices N] [--json]

Prompts of 8,192 tokens: a prefix of 4,096 that many replicas hold, a conversation of turns of 64
tokens that one replica holds, and one new turn. Then conversations take turns: the last turn of one
is dropped, another one gets one, in batches of 64 events. Where ai-dynamo-runtime is installed its
index is given the same in blocks of 64 tokens; a look-up there is hashing and matching, in its
threads, too. All times are CPU times of the process.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from harness.arguments import parse
from harness.report import print_table

from radixserve.arrays import IntArray
from radixserve.cache.events import Event, EventBatch, EventSnapshot, Removed, Stored
from radixserve.routing.tree_router import TreeRouter

TURN = 64  # tokens
NUM_TURNS = 64  # of a shared prefix; of a conversation with the new one
BATCH = 64  # events


@dataclass(frozen=True)
class World:
    """Conversation c of each replica goes on from prefix c % len(prefixes)."""

    prefixes: IntArray  # [prefixes, NUM_TURNS, TURN]
    num_replicas: int
    per_replica: int  # conversations

    def turns(self, replica: int, at: int) -> IntArray:
        """[NUM_TURNS, TURN]; the last one is new."""
        seed = (replica * self.per_replica + at + 1, 7)
        return np.random.default_rng(seed).integers(0, 50_000, (NUM_TURNS, TURN), np.int32)

    def prompt(self, replica: int, at: int) -> IntArray:
        prefix = self.prefixes[at % len(self.prefixes)]
        return np.concatenate([prefix.reshape(-1), self.turns(replica, at).reshape(-1)])

    def stored(self, replica: int) -> list[Stored]:
        """All that a replica holds. Prefixes are one node, turns one each."""
        nodes = []
        for at in range(min(self.per_replica, len(self.prefixes))):
            nodes.append(Stored(at + 1, 0, "", self.prefixes[at].tobytes()))
        for at in range(self.per_replica):
            parent = at % len(self.prefixes) + 1
            for number, turn in enumerate(self.turns(replica, at)[:-1]):
                node = self.node(at, number)
                nodes.append(Stored(node, parent, "", turn.tobytes()))
                parent = node
        return nodes

    def node(self, at: int, number: int) -> int:
        return len(self.prefixes) + 1 + at * NUM_TURNS + number


def main() -> None:
    args = parse(__doc__, edges=1_000_000, replicas=64, choices=2_000, json=False)
    per_replica = max(1, args.edges // args.replicas // (NUM_TURNS - 1))
    prefixes = np.random.default_rng(0).integers(0, 50_000, (32, NUM_TURNS, TURN), np.int32)
    world = World(prefixes, args.replicas, per_replica)
    found = measure(world, args.choices)
    if importlib.util.find_spec("dynamo") is not None:
        found |= measure_dynamo(world, args.choices)
    print_table(args, ("", "value"), [*found.items()])


def measure(world: World, num_choices: int) -> dict[str, float]:
    router = TreeRouter()
    start, num_events = time.process_time(), 0
    for replica in range(world.num_replicas):
        router.add(f"r{replica}")
        router.restart(f"r{replica}", EventSnapshot(1, 0, []))
        nodes = world.stored(replica)
        num_events += len(nodes)
        router.take(f"r{replica}", EventBatch(1, 0, nodes))
    built = time.process_time() - start
    choose, ended = [], []
    for number in range(num_choices):
        tokens = world.prompt(*pick(world, number)).tobytes()
        choose.append(timed(router.choose, str(number), tokens))
        if number >= 256:  # so many are under way
            ended.append(timed(router.end, str(number - 256), 100))
    batches = [churn(world, number, router) for number in range(num_choices)]
    seconds = sum(timed(router.take, *one) for one in batches)
    return {
        "edges": router.index.num_edges,
        "choice us, median": 1e6 * float(np.median(choose)),
        "p99": 1e6 * float(np.quantile(choose, 0.99)),
        "end us, median": 1e6 * float(np.median(ended)),
        "events/s": len(batches) * BATCH / seconds,
        "events/s while built": num_events / built,
    }


def churn(world: World, number: int, router: TreeRouter) -> tuple[str, EventBatch]:
    """The next batch of a replica: last turns are dropped and stored again, under new ids."""
    replica, turn = number % world.num_replicas, number // world.num_replicas
    events: list[Event] = []
    last = NUM_TURNS - 2
    for pair in range(BATCH // 2):
        at = (turn * (BATCH // 2) + pair) % world.per_replica
        generation = (turn * (BATCH // 2) + pair) // world.per_replica
        node = world.node(at, last) + generation * 10**9
        tokens = world.turns(replica, at)[last].tobytes()
        events.append(Removed(node, TURN))
        events.append(Stored(node + 10**9, world.node(at, last - 1), "", tokens))
    name = f"r{replica}"
    first = router.index.next_event(name) + turn * BATCH
    return name, EventBatch(1, first, events)


def pick(world: World, number: int) -> tuple[int, int]:
    """Replica and conversation of a request."""
    rng = np.random.default_rng((number, 3))
    return int(rng.integers(world.num_replicas)), int(rng.integers(world.per_replica))


def measure_dynamo(world: World, num_choices: int) -> dict[str, float]:
    from dynamo.llm import RadixTree, compute_block_hash_for_seq

    tree, ids = RadixTree(), iter(range(10**12))

    def event_of(data: dict[str, object]) -> bytes:
        event = {"event_id": next(ids), "data": data, "dp_rank": 0}
        return json.dumps(event).encode()

    def store(tokens: IntArray) -> bytes:
        hashes = compute_block_hash_for_seq(tokens.tolist(), TURN)
        chained, blocks = 0, []
        for local in hashes:
            chained = hash((chained, local)) & (2**63 - 1)
            blocks.append({"block_hash": chained, "tokens_hash": local})
        return event_of({"stored": {"parent_hash": None, "blocks": blocks}})

    def look_up(tokens: list[int]) -> None:
        tree.find_matches(compute_block_hash_for_seq(tokens, TURN))

    for replica in range(world.num_replicas):
        for at in range(world.per_replica):
            tree.apply_event(replica, store(world.prompt(replica, at)[:-TURN]))
    choose = []
    for number in range(num_choices):
        tokens = world.prompt(*pick(world, number)).tolist()
        choose.append(timed(look_up, tokens))
    return {
        "ai-dynamo-runtime: look-up us, median": 1e6 * float(np.median(choose)),
        "ai-dynamo-runtime: p99": 1e6 * float(np.quantile(choose, 0.99)),
    }


def timed(call: Callable[..., object], *args: object) -> float:
    """Seconds of this process's CPU time."""
    start = time.process_time()
    call(*args)
    return time.process_time() - start


if __name__ == "__main__":
    main()
