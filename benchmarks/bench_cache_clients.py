"""What those cost who follow or steer a cache: hints, snapshots, events, a router's index.

    python benchmarks/bench_cache_clients.py [--only hints,snapshot,events,router] [--json]
        [--prompts 75] [--tokens 12000] [--shared 2000]    of hints
        [--nodes 1000,100000] [--page-size 16]             of snapshots
        [--steps 1000] [--step-tokens 2000] [--repeats 9]  of events
        [--edges N] [--replicas 64] [--choices 2000]       of the router

hints      One owner has `prompts` prompts of `tokens` tokens, the first `shared` of which are the
           same, and gives each verb for each of them, beside a look-up: median and 90th percentile.
snapshot   Of a tree with 200 running sequences, for the server's page: processor time of a snapshot
           (median of 15) and of its JSON, of a dump of 400 nodes, and how often a page may move
           with all snapshots below 1 % of the time.
events     A step computes a prompt that shares its first half with others and evicts as much; then
           the events are taken. Processor time of the thread that owns the cache, and of all
           threads. Repeats are interleaved; medians. Needs radixserve[kv-events].
router     Prompts of 8,192 tokens: a prefix of 4,096 that many replicas hold, a conversation of
           turns of 64 tokens that one replica holds, and one new turn. Then conversations take
           turns: the last turn of one is dropped, another one gets one, in batches of 64 events.

No model. One table each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from timeit import repeat, timeit

import numpy as np
from cache.contenders import PagedTree
from harness.arguments import Names, parse
from harness.processes import take_turns
from harness.report import Table, print_tables

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, RadixCache, SnapshotView
from radixserve.cache.events import Event, EventBatch, EventSnapshot, Removed, Stored
from radixserve.fleet.tree_router import TreeRouter
from radixserve.hints.granted import Hints
from radixserve.hints.hint import Hint, HintLimits
from radixserve.scheduler.sessions import Sessions

RUNNING, REPEATS = 200, 15  # of snapshots
VERBS = ("retain", "pin", "demote", "share")
KINDS = {"none": "no log", "log": "a log, taken", "published": "published in blocks of 16"}
TURN = 64  # tokens
NUM_TURNS = 64  # of a shared prefix; of a conversation with the new one
BATCH = 64  # events


@dataclass(frozen=True)
class World:
    """Conversation c of each replica goes on from prefix c % len(prefixes)."""

    prefixes: IntArray  # [prefixes, NUM_TURNS, TURN]
    num_replicas: int
    per_replica: int  # conversations

    def turns(self, replica: int, chat: int) -> IntArray:
        """[NUM_TURNS, TURN]; the last one is new."""
        seed = (replica * self.per_replica + chat + 1, 7)
        return np.random.default_rng(seed).integers(0, 50_000, (NUM_TURNS, TURN), np.int32)

    def prompt(self, replica: int, chat: int) -> IntArray:
        prefix = self.prefixes[chat % len(self.prefixes)]
        return np.concatenate([prefix.reshape(-1), self.turns(replica, chat).reshape(-1)])

    def stored(self, replica: int) -> list[Stored]:
        """All that a replica holds. Prefixes are one node, turns one each."""
        nodes = []
        for index, prefix in enumerate(self.prefixes[: self.per_replica]):
            nodes.append(Stored(index + 1, 0, "", prefix.tobytes()))
        for chat in range(self.per_replica):
            parent = chat % len(self.prefixes) + 1
            for number, turn in enumerate(self.turns(replica, chat)[:-1]):
                node = self.node(chat, number)
                nodes.append(Stored(node, parent, "", turn.tobytes()))
                parent = node
        return nodes

    def node(self, chat: int, number: int) -> int:
        return len(self.prefixes) + 1 + chat * NUM_TURNS + number


# -- hints ----------------------------------------------------------------------------------------


def hints_table(args: argparse.Namespace) -> Table:
    rng, num_own = np.random.default_rng(0), args.tokens - args.shared
    shared = rng.integers(0, 50_000, args.shared, dtype=np.int32)
    tails = rng.integers(0, 50_000, (args.prompts, num_own), dtype=np.int32)
    prompts = [np.concatenate([shared, tail]) for tail in tails]
    cache = RadixCache(4 * (args.shared + args.prompts * num_own))
    tree = PagedTree(cache)
    for tokens in prompts:
        tree.request(tokens)
    hints = Hints(cache, Sessions(cache), HintLimits())

    def give(verb: str, tokens: IntArray) -> None:
        answer = hints.apply(Hint(verb, tokens, owner="owner", budget_tokens=10**9))
        assert answer.answer == "accepted", answer

    operations = {"look-up": cache.lookup, **{verb: partial(give, verb) for verb in VERBS}}
    rows = []
    for name, call in operations.items():
        seconds = [timeit(partial(call, prompt), number=1) for prompt in prompts]
        rows.append([name, *(1e6 * np.quantile(seconds, (0.5, 0.9))).round(1).tolist()])
    cache.check()
    return Table(("hints, us", "median", "p90"), rows)


# -- snapshots ------------------------------------------------------------------------------------


def snapshot_table(args: argparse.Namespace) -> Table:
    from radixserve.server.routes.dashboard_page import EVERY_S, SHARE

    columns = ("nodes", "pages", "snapshot ms", "JSON ms", "dump ms", "a page moves every, s")
    rows = []
    for size in args.nodes:
        cache = grow(size, args.page_size)
        snapshot = milliseconds(partial(cache.snapshot, SnapshotView()))
        text = milliseconds(partial(json.dumps, cache.snapshot(SnapshotView())))
        dump = milliseconds(partial(cache.dump, 400))
        every = max(EVERY_S, (snapshot + text) / 1e3 / SHARE)
        rows.append([cache.gauges()["nodes"], cache.num_pages, snapshot, text, dump, every])
    return Table(columns, rows)


def grow(num_nodes: int, page_size: int) -> RadixCache:
    """Branches that leave others at random places; the last sequences go on."""
    rng = np.random.default_rng(0)
    cache = RadixCache(num_nodes * (3 + 40 // page_size), page_size)
    trunks: list[IntArray] = [rng.integers(0, 1000, 500).astype(np.int32)]
    running: list[CacheSequence] = []
    while cache.gauges()["nodes"] < num_nodes:
        trunk = trunks[rng.integers(len(trunks))]
        tail = rng.integers(0, 1000, rng.integers(5, 30))
        tokens = np.concatenate((trunk[: rng.integers(len(trunk))], tail)).astype(np.int32)
        sequence = cache.acquire(tokens)
        sequence.extend(tokens[sequence.cached_len :])
        sequence.commit(sequence.length)
        trunks = [*trunks[-2999:], tokens] if len(trunks) < 3000 else trunks
        running.append(sequence)
        if len(running) > RUNNING:
            running.pop(0).release()
    return cache


def milliseconds(call: Callable[[], object]) -> float:
    """Without the garbage collector, as in the engine."""
    return median(repeat(call, timer=time.thread_time, repeat=REPEATS, number=1)) * 1e3


# -- events ---------------------------------------------------------------------------------------


def events_table(args: argparse.Namespace) -> Table:
    prompts = make_prompts(args.steps, args.step_tokens)
    runs = take_turns({kind: partial(run_events, prompts, kind) for kind in KINDS}, args.repeats)
    rows = [[KINDS[kind], *np.median(times, axis=0).tolist()] for kind, times in runs.items()]
    return Table(("us a step", "owner's thread", "all threads"), rows)


def make_prompts(count: int, num_tokens: int) -> list[IntArray]:
    rng = np.random.default_rng(0)
    half = num_tokens // 2
    heads = rng.integers(0, 50_000, (16, half), dtype=np.int32)
    own = rng.integers(0, 50_000, (count, num_tokens - half), dtype=np.int32)
    return [np.concatenate([heads[index % 16], tail]) for index, tail in enumerate(own)]


def run_events(prompts: list[IntArray], kind: str, _turn: int) -> tuple[float, float]:
    """Processor microseconds a step: of this thread, of all."""
    from radixserve.kv_events.publisher import KVEventPublisher

    cache = RadixCache(40 * len(prompts[0]))
    tree = PagedTree(cache)
    hand_on: Callable[[], object] | None = None
    with tempfile.TemporaryDirectory() as folder:
        publisher = None
        if kind == "log":
            hand_on = cache.open_events().take
        elif kind == "published":
            publisher = KVEventPublisher(cache.open_events(), f"ipc://{folder}/pub")
            hand_on = publisher.publish
        mine, all_threads = time.thread_time(), time.process_time()
        for tokens in prompts:
            tree.request(tokens)
            if hand_on is not None:
                hand_on()
        mine = time.thread_time() - mine
        if publisher is not None:
            publisher.close()  # when all is sent
        all_threads = time.process_time() - all_threads
    return 1e6 * mine / len(prompts), 1e6 * all_threads / len(prompts)


# -- a router's index -----------------------------------------------------------------------------


def router_table(args: argparse.Namespace) -> Table:
    per_replica = max(1, args.edges // args.replicas // (NUM_TURNS - 1))
    prefixes = np.random.default_rng(0).integers(0, 50_000, (32, NUM_TURNS, TURN), np.int32)
    figures = measure_router(World(prefixes, args.replicas, per_replica), args.choices)
    return Table(("router", "value"), [*figures.items()])


def measure_router(world: World, num_choices: int) -> dict[str, float]:
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
    seconds = sum(timed(router.take, *batch) for batch in batches)
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
        chat = (turn * (BATCH // 2) + pair) % world.per_replica
        generation = (turn * (BATCH // 2) + pair) // world.per_replica
        node = world.node(chat, last) + generation * 10**9
        tokens = world.turns(replica, chat)[last].tobytes()
        events.append(Removed(node, TURN))
        events.append(Stored(node + 10**9, world.node(chat, last - 1), "", tokens))
    name = f"r{replica}"
    first = router.index.next_event(name) + turn * BATCH
    return name, EventBatch(1, first, events)


def pick(world: World, number: int) -> tuple[int, int]:
    """Replica and conversation of a request."""
    rng = np.random.default_rng((number, 3))
    return int(rng.integers(world.num_replicas)), int(rng.integers(world.per_replica))


def timed(call: Callable[..., object], *args: object) -> float:
    """Seconds of this process's CPU time."""
    start = time.process_time()
    call(*args)
    return time.process_time() - start


TABLES: dict[str, Callable[[argparse.Namespace], Table]] = {
    "hints": hints_table,
    "snapshot": snapshot_table,
    "events": events_table,
    "router": router_table,
}


def main() -> None:
    args = parse(
        __doc__,
        only=Names("client", TABLES),
        prompts=75,
        tokens=12_000,
        shared=2_000,
        nodes=[1_000, 10_000, 100_000],
        page_size=16,
        steps=1_000,
        step_tokens=2_000,
        repeats=9,
        edges=1_000_000,
        replicas=64,
        choices=2_000,
        json=False,
    )
    print_tables(args, [TABLES[name](args) for name in args.only])


if __name__ == "__main__":
    main()
