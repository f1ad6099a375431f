"""Nodes of shared pages against a naive tree, and what every token of a plan gets to see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from radixserve.attention import cpu as cpu_backend
from radixserve.attention import reference
from radixserve.attention.base import AttentionMetadata, ForwardBatch
from radixserve.attention.cpu import plan_step
from radixserve.attention.cuda.cascade import CascadeCost, NodeFinder, covered_pages, find_shared
from radixserve.attention.reference import ReferenceBackend
from radixserve.request import BeamParams
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_attention import CAUSAL, Jobs
from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.attention.cases import CPU, SharedCase
from tests.attention.cells import cells_of_jobs, check_reads, expected_cells
from tests.scheduler.fake import Driver, random_prompt

HAS_KERNELS = not unsupported_reason(torch.float32)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="there are no CPU kernels here")
Pays = Callable[[int, int], bool]
Node = tuple[tuple[int, ...], int, int, int]  # rows, first page, end, level

PAYS: dict[str, Pays] = {
    "always": lambda *_: True,
    "never": lambda *_: False,
    "many rows": lambda num_rows, _: num_rows > 2,
    "many tokens": lambda _, num_tokens: num_tokens >= 12,
    "by cost": lambda num_rows, num_tokens: (num_rows - 1) * num_tokens > num_rows * 5,
    "at random": lambda num_rows, num_tokens: (num_rows * 7 + num_tokens * 5) % 3 > 0,
}


def random_rows(rng: random.Random, page_size: int) -> list[ScheduledRequest]:
    """Rows that fork off each other at every depth: whole pages are shared, the next is copied."""
    unused = iter(rng.sample(range(2_000), 2_000))
    tables: list[list[int]] = []
    rows = []
    for number in range(rng.randint(1, 12)):
        start = rng.choice([0, rng.randrange(8), rng.randrange(40), 60])
        new = rng.choice([1, 1, 1, 2, rng.randint(1, 30), 70])
        pages: list[int] = []
        if tables and rng.random() < 0.8:
            other = rng.choice(tables)
            pages = other[: rng.randint(0, len(other))][: start // page_size]
        while len(pages) * page_size < start + new:
            pages.append(next(unused))
        if rng.random() < 0.9:
            tables.append(pages)
        ids = np.array(pages, np.int32)
        rows.append(ScheduledRequest(f"r{number}", np.ones(new, np.int32), start, ids, None))
    if rng.random() < 0.2:  # the very same pages, new tokens and all
        rows += [rng.choice(rows) for _ in range(3)]
    rng.shuffle(rows)
    return rows


def naive_nodes(
    rows: list[ScheduledRequest], page_size: int, pays: Pays, unit: int = 1
) -> list[Node]:
    """The same from a dictionary of all heads of all page tables. A node ends at a multiple of
    `unit` pages."""
    sessions: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        whole = row.page_ids[: row.start // page_size].tolist()
        for length in range(1, len(whole) + 1):
            sessions.setdefault(tuple(whole[:length]), []).append(number)
    found: list[Node] = []

    def walk(head: tuple[int, ...], first: int, level: int) -> None:
        for longer in [one for one in sessions if len(one) == len(head) + 1]:
            if longer[:-1] != head or len(sessions[longer]) < 2:
                continue
            group, grown = sessions[longer], longer
            while more := [one for one in sessions if one[:-1] == grown and sessions[one] == group]:
                grown = more[0]
            end = len(grown) // unit * unit
            if pays(len(group), (end - first) * page_size):
                found.append((tuple(group), first, end, level))
                walk(grown, end, level + 1)
            else:
                walk(grown, first, level)

    walk((), 0, 0)
    return found


@pytest.mark.parametrize("pays", PAYS)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_nodes_are_those_of_a_naive_tree(page_size: int, pays: str) -> None:
    for seed in range(15):
        check_nodes(seed, page_size, PAYS[pays])


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_many_trees(page_size: int) -> None:
    for seed in range(100, 600):
        for pays in PAYS.values():
            check_nodes(seed, page_size, pays)
            check_plans(random_rows(random.Random(seed), page_size), page_size)


def check_nodes(seed: int, page_size: int, pays: Pays) -> None:
    rows = random_rows(random.Random(seed), page_size)
    host = build_forward_batch(rows, page_size, CPU).host
    nodes = find_shared(host, page_size, pays)
    plain = [(tuple(node.rows.tolist()), node.first, node.end, node.level) for node in nodes]
    assert sorted(plain) == sorted(naive_nodes(rows, page_size, pays))
    assert [node.level for node in nodes] == sorted(node.level for node in nodes)
    covered = covered_pages(nodes, len(rows))
    for number, row in enumerate(rows):
        own = [node for node in nodes if number in node.rows]
        assert [node.level for node in own] == list(range(len(own)))
        assert all(a.end == b.first for a, b in pairwise(own))
        assert not own or own[0].first == 0
        assert covered[number] == (own[-1].end if own else 0)
        assert covered[number] * page_size <= row.start


def test_pages_with_new_tokens_are_never_shared() -> None:
    case = SharedCase([(63, 1), (63, 2)], 2, [((0, 1), 31)], heads=4, kv_heads=2, dim=8)
    (found,) = find_shared(case.batch.host, 2, PAYS["always"])
    assert (found.first, found.end) == (0, 31)  # the page of position 63 is each row's own
    same = [row._replace(page_ids=case.rows[1].page_ids) for row in case.rows[1:] * 2]
    (found,) = find_shared(build_forward_batch(same, 2, CPU).host, 2, PAYS["always"])
    assert (found.first, found.end) == (0, 31)


def test_a_node_that_does_not_pay_is_read_with_its_child() -> None:
    """The child's pages begin where the last ancestor that pays ends."""
    pages = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 2, 8], [1, 9]]
    rows = [
        ScheduledRequest("", np.ones(1, np.int32), len(p) - 1, np.array(p, np.int32), None)
        for p in pages
    ]
    host = build_forward_batch(rows, 1, CPU).host
    found = find_shared(host, 1, lambda num_rows, num_tokens: num_rows == 5 or num_tokens > 2)
    assert [(n.rows.tolist(), n.first, n.end, n.level) for n in found] == [
        ([0, 1, 2, 3, 4], 0, 1, 0),
        ([0, 1], 1, 4, 1),
    ]


def jobs_of(batch: ForwardBatch, *, shares: bool = True) -> Jobs:
    return plan_step(batch.host, batch.page_size, (4, 2, 4), shares=shares).jobs()


def check_jobs(seed: int, page_size: int, merge_tokens: int) -> None:
    """The nodes that compiled code finds are those of the naive tree, level by level; they end on
    the grid of jobs."""
    rows = random_rows(random.Random(seed), page_size)
    batch = build_forward_batch(rows, page_size, CPU)
    jobs = jobs_of(batch)
    row_of = np.repeat(np.arange(len(rows)), [len(row.token_ids) for row in rows]).tolist()
    found: list[Node] = []
    for level, (first, end) in enumerate(pairwise(jobs.level_indptr.tolist())):
        for job in range(first, end):
            if jobs.flags[job] & CAUSAL:
                continue
            tokens = jobs.query_tokens[jobs.query_indptr[job] : jobs.query_indptr[job + 1]]
            members = tuple(dict.fromkeys(row_of[token] for token in tokens.tolist()))
            at = int(jobs.first_page[job] - batch.host.kv_indptr[members[0]])
            found.append((members, at, at + int(jobs.num_keys[job]) // page_size, level))
            assert jobs.num_keys[job] % page_size == 0
    pays: Pays = lambda n, tokens: (n - 1) * tokens > n * merge_tokens  # noqa: E731
    unit = max(1, cpu_library().radixserve_job_grid() // page_size)
    assert sorted(found) == sorted(naive_nodes(rows, page_size, pays, unit))


@needs_kernels
@pytest.mark.parametrize("merge_tokens", [0, 1, 5, 24, 1 << 40])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_jobs_are_those_of_a_naive_tree(
    page_size: int, merge_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", merge_tokens)
    for seed in range(20):
        check_jobs(seed, page_size, merge_tokens)


# -- what tokens see ------------------------------------------------------------------------------


@pytest.fixture(params=["always", "never", "by cost"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "by cost":
        always = request.param == "always"
        monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", 0 if always else 1 << 40)
    return str(request.param)


def check_plans(rows: list[ScheduledRequest], page_size: int) -> ForwardBatch:
    """Both backends' plans show every token its own cells, each once. Returns the batch."""
    batch = build_forward_batch(rows, page_size, CPU)
    expected = expected_cells(rows, page_size)
    for shares in (True, False):
        if HAS_KERNELS:
            assert cells_of_jobs(jobs_of(batch, shares=shares)) == expected
    num_pages = int(batch.host.kv_indices.max()) + 1
    check_reads(ReferenceBackend(torch.empty(1, 2, num_pages, page_size, 2, 4), 4), batch, expected)
    return batch


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_every_token_sees_its_own_cells_once(page_size: int) -> None:
    for seed in range(25):
        check_plans(random_rows(random.Random(seed), page_size), page_size)


@pytest.mark.parametrize(("queries", "short", "keys"), [(1, 0, 1), (7, 16, 100), (64, 1, 1 << 30)])
def test_however_rows_are_grouped(
    queries: int, short: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BLOCK_QUERIES", queries), ("SHORT_KEYS", short), ("CALL_KEYS", keys)):
        monkeypatch.setattr(reference, name, value)
    for seed in range(15):
        check_plans(random_rows(random.Random(seed), 2), 2)


# -- rows as the scheduler makes them -------------------------------------------------------------


def scheduled_rows(page_size: int) -> Iterator[list[ScheduledRequest]]:
    """A scheduler's rows, step by step: forks and beams of one prompt, under memory pressure."""
    rng = random.Random(page_size)
    driver = Driver(num_pages=-(-700 // page_size), page_size=page_size, max_running_requests=10)
    prompt = [rng.randrange(2, 50) for _ in range(100)]
    driver.add("first", prompt, max_tokens=6, ignore_eos=True)
    known = [prompt]
    for step in range(80):
        if step % 3 == 1 and step < 40:
            known.append(random_prompt(rng, known, 160))
            driver.add(f"fork {step}", known[-1], max_tokens=rng.randint(1, 12), ignore_eos=True)
        if step in (6, 20):
            beams = BeamParams(width=3)
            driver.add(f"beams {step}", [*prompt, 7], beams=beams, max_tokens=9, ignore_eos=True)
        if step == 30:
            driver.abort("beams 20")
        if (schedule := driver.step()) is not None:
            yield list(schedule.rows)
    driver.run()
    driver.drain()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_rows_of_the_real_cache(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans hold in every step."""
    monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", 0)
    levels, num_shared = 0, 0
    for rows in scheduled_rows(page_size):
        batch = check_plans(rows, page_size)
        nodes = find_shared(batch.host, page_size, PAYS["always"])
        num_shared += len(nodes)
        levels = max([levels, *(node.level + 1 for node in nodes)])
    assert num_shared > 10
    assert levels >= 2


def step_of_rows(
    pages: list[list[int]], slots: list[int], first_new: list[int]
) -> AttentionMetadata:
    """Rows of one token on pages of one, the last of which are new."""
    lens = np.array([len(ids) for ids in pages])
    return AttentionMetadata(
        lens - 1,
        np.arange(len(pages) + 1),
        np.concatenate(([0], np.cumsum(lens))),
        lens,
        [np.array(ids, np.int32) for ids in pages],
        row_slots=np.array(slots),
        first_new_page=np.array(first_new),
    )


def nodes_of(finder: NodeFinder, host: AttentionMetadata) -> list[tuple[list[int], int, int]]:
    return [(node.rows.tolist(), node.first, node.end) for node in finder.find(host)]


def test_nodes_are_found_anew_when_rows_or_their_earlier_pages_change() -> None:
    """And only then: page tables of rows that have only grown are not looked at."""
    finder = NodeFinder(1, CascadeCost(least_tokens=1, merge_tokens=0))
    tables = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 4, 12]]
    both = [([0, 1, 2], 0, 2), ([0, 1], 2, 3)]
    assert nodes_of(finder, step_of_rows(tables, [0, 1, 2], [0, 0, 0])) == both
    grown = [[*ids, 20 + at] for at, ids in enumerate(tables)]
    unread = step_of_rows(grown, [0, 1, 2], [4, 4, 4])
    unread.release()
    assert nodes_of(finder, unread) == both
    replaced = [*grown[:2], [1, 2, 3, 12, 22, 32]]  # the third goes on with the others' page
    replaced[:2] = [[*ids, 30] for ids in replaced[:2]]
    three = [([0, 1, 2], 0, 3)]
    assert nodes_of(finder, step_of_rows(replaced, [0, 1, 2], [5, 5, 2])) == three
    other = [*([*ids, 40] for ids in replaced[:2]), [7, 8, 9]]  # another sequence in its slot
    two = [([0, 1], 0, 3)]
    assert nodes_of(finder, step_of_rows(other, [0, 1, 2], [6, 6, 0])) == two
    assert nodes_of(finder, step_of_rows(other[1:], [1, 2], [6, 2])) == []
    assert nodes_of(finder, step_of_rows(other[:1], [0], [6])) == []  # nothing can be shared
    assert nodes_of(finder, step_of_rows(replaced, [0, 1, 2], [6, 6, 6])) == three
