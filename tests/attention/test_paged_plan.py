"""The host's side of the CUDA backends: what every token sees, levels, orders and padding."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import numpy as np
import pytest

from radixserve.attention.base import AttentionMetadata
from radixserve.attention.cuda.cascade import (
    MAX_LEVELS,
    CascadeCost,
    NodeFinder,
    SharedNode,
    drop_levels,
    find_shared,
    limit_levels,
    saved_pages,
)
from radixserve.attention.cuda.graph_plan import GraphShape, plan_graph, plan_level
from radixserve.attention.cuda.plan import (
    MAX_KERNEL_PAGE_SIZE,
    CudaAttentionPlan,
    PageRanges,
    choose_kernel_page_size,
    plan_rows,
    tree_order,
)
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from tests.attention.cases import CPU
from tests.attention.cells import cells_of_paged, expected_cells
from tests.attention.test_cascade import PAYS, random_rows, scheduled_rows

FREE = CascadeCost(1, 0)


def find_nodes(
    host: AttentionMetadata, page_size: int, cost: CascadeCost, max_levels: int = MAX_LEVELS
) -> list[SharedNode]:
    return NodeFinder(page_size, cost).find(host, max_levels)


def graph_plan(
    host: AttentionMetadata,
    page_size: int,
    nodes: list[SharedNode],
    kernel_page_size: int,
    shape: GraphShape,
) -> CudaAttentionPlan:
    level = plan_level(host, page_size, nodes, kernel_page_size, shape)
    return plan_graph(host, page_size, level, kernel_page_size, shape)


def host_of(rows: list[ScheduledRequest], page_size: int) -> AttentionMetadata:
    return build_forward_batch(rows, page_size, CPU).host


def check_plan(
    rows: list[ScheduledRequest], page_size: int, nodes: list[SharedNode], kernel_page_size: int
) -> CudaAttentionPlan:
    """Every token sees its own cells, each once; kinds and levels are where they belong."""
    host = host_of(rows, page_size)
    plan = plan_rows(host, page_size, nodes, kernel_page_size)
    expected = [sorted(cells) for cells in expected_cells(rows, page_size)]
    assert [sorted(cells) for cells in cells_of_paged(plan, host, kernel_page_size)] == expected
    kinds = [part.is_decode for part in plan.unique]
    assert len(kinds) == len(set(kinds))
    assert len(plan.shared) == max((node.level + 1 for node in nodes), default=0)
    return plan


@pytest.mark.parametrize("pays", ["always", "never", "by cost"])
@pytest.mark.parametrize(
    ("page_size", "kernel_page_size"), [(1, 1), (2, 2), (2, 1), (16, 16), (16, 4), (6, 3)]
)
def test_every_token_sees_its_own_cells_once(
    page_size: int, kernel_page_size: int, pays: str
) -> None:
    for seed in range(15):
        rows = random_rows(random.Random(seed), page_size)
        nodes = find_shared(host_of(rows, page_size), page_size, PAYS[pays])
        check_plan(rows, page_size, nodes, kernel_page_size)
        check_plan(rows, page_size, limit_levels(nodes, 1), kernel_page_size)
        check_plan(rows, page_size, drop_levels(nodes, 1 + seed), kernel_page_size)


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_many_plans(page_size: int) -> None:
    for seed in range(100, 200):
        rows = random_rows(random.Random(seed), page_size)
        for pays, max_levels in itertools.product(PAYS.values(), (0, 1, 2, 9)):
            nodes = find_shared(host_of(rows, page_size), page_size, pays)
            nodes = drop_levels(limit_levels(nodes, max_levels), seed % 40)
            for kernel_page_size in {1, page_size}:
                check_plan(rows, page_size, nodes, kernel_page_size)
        check_graph(decodes_of(rows), page_size, kernel_page_size=1, num_groups=9)


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_rows_of_a_node_lie_together(page_size: int) -> None:
    """But for those of several tokens, which lie behind: a node has two runs at most."""
    for seed in range(40):
        rows = random_rows(random.Random(seed), page_size)
        nodes = find_shared(host_of(rows, page_size), page_size, PAYS["always"])
        is_long = np.array([len(row.token_ids) > 1 for row in rows])
        order = tree_order(nodes, is_long)
        assert sorted(order.tolist()) == list(range(len(rows)))
        assert not (np.diff(is_long[order].astype(int)) < 0).any()
        place = np.argsort(order)
        for node in nodes:
            for kind in (False, True):
                places = np.sort(place[node.rows[is_long[node.rows] == kind]])
                assert not len(places) or places[-1] - places[0] == len(places) - 1


def test_rows_stay_where_they_are_if_that_will_do() -> None:
    """One kind, or one behind the other, whichever comes first, or a tree in order."""

    def lengths_of(*new: int) -> list[ScheduledRequest]:
        return [
            ScheduledRequest("", np.ones(n, np.int32), 0, np.arange(n, dtype=np.int32), None)
            for n in new
        ]

    for new, is_moved in (((1, 1), False), ((3, 4), False), ((1, 1, 5), False)):
        assert (check_plan(lengths_of(*new), 1, [], 1).order is not None) == is_moved
    assert check_plan(lengths_of(5, 5, 1, 1), 1, [], 1).order is None
    moved = check_plan(lengths_of(2, 1, 3, 1), 1, [], 1)
    assert moved.order is not None
    assert moved.order.tolist() == [2, 6, 0, 1, 3, 4, 5]


def test_whole_rows_need_no_page_ids_from_the_host() -> None:
    """A plan without nodes names ranges of the batch's kv_indices, which may not exist here."""
    rows = [row for row in random_rows(random.Random(3), 2) if len(row.token_ids) == 1]
    for part in check_plan(rows, 2, [], 2).unique:
        assert isinstance(part.kv_indices, slice)
    short = [row._replace(start=0, page_ids=row.page_ids[:1]) for row in rows]
    host = host_of(short, 2)
    assert find_nodes(host, 2, FREE) == []
    plan_rows(host, 2, [], 2)
    graph_plan(host, 2, [], 2, GraphShape(len(short), 100, 3))
    assert not host.is_flattened


def test_shared_pages_need_no_page_ids_from_the_host_either() -> None:
    """A step with a shared prefix, found anew and then as in the step before."""
    finder = NodeFinder(1, CascadeCost(1, 0))
    for own in (1, 2, 3):
        rows = [
            row._replace(
                start=500 + own,
                page_ids=np.append(row.page_ids, 10_000 + 10 * at + np.arange(own, dtype=np.int32)),
            )
            for at, row in enumerate(same_prefix(64, 500))
        ]
        host = host_of(rows, 1)
        nodes = finder.find(host, 1)
        assert [(len(node.rows), node.end) for node in nodes] == [(64, 500)]
        for plan in (
            graph_plan(host, 1, nodes, 1, GraphShape(64, 64 * 600, 3)),
            plan_rows(host, 1, nodes, 1),
        ):
            assert isinstance(plan.unique[0].kv_indices, PageRanges)
            assert isinstance(plan.shared[0].kv_indices, np.ndarray)
            assert plan.shared[0].kv_indices.tolist() == list(range(500))
        assert not host.is_flattened


# -- levels ---------------------------------------------------------------------------------------


def node(rows: list[int], first: int, end: int, level: int) -> SharedNode:
    return SharedNode(np.array(rows), first, end, level)


def plain(nodes: list[SharedNode]) -> list[tuple[list[int], int, int, int]]:
    return [(one.rows.tolist(), one.first, one.end, one.level) for one in nodes]


def test_levels_that_go_are_those_whose_pages_cost_least() -> None:
    few_tokens_above = [
        node([0, 1, 2, 3], 0, 2, 0),
        node([0, 1], 2, 50, 1),
        node([2, 3], 2, 60, 1),
    ]
    assert plain(limit_levels(few_tokens_above, 1)) == [([0, 1], 0, 50, 0), ([2, 3], 0, 60, 0)]
    many_above = [node([0, 1, 2, 3], 0, 80, 0), node([0, 1], 80, 90, 1), node([2, 3], 80, 85, 1)]
    assert plain(limit_levels(many_above, 1)) == [([0, 1, 2, 3], 0, 80, 0)]
    chain = [
        node([0, 1, 2, 3, 4], 0, 10, 0),
        node([0, 1, 2], 10, 12, 1),
        node([0, 1], 12, 30, 2),
        node([3, 4], 10, 20, 1),
    ]
    assert plain(limit_levels(chain, 2)) == [
        ([0, 1, 2, 3, 4], 0, 10, 0),
        ([0, 1], 10, 30, 1),
        ([3, 4], 10, 20, 1),
    ]
    assert limit_levels(chain, 0) == []
    assert plain(limit_levels(chain, 3)) == plain(sorted(chain, key=lambda one: one.level))


@pytest.mark.parametrize("max_levels", [0, 1, 2, 3])
def test_limited_levels_are_still_a_tree(max_levels: int) -> None:
    for seed in range(60):
        rows = random_rows(random.Random(seed), 1)
        every = find_shared(host_of(rows, 1), 1, PAYS["always"])
        kept = limit_levels(every, max_levels)
        if seed % 2:
            kept = drop_levels(kept, 20)
        for number in range(len(rows)):
            own = [one for one in kept if number in one.rows]
            assert [one.level for one in own] == list(range(len(own)))
            assert len(own) <= max_levels
            assert all(a.end == b.first for a, b in pairwise(own))
            assert not own or own[0].first == 0
        assert saved_pages(kept) <= saved_pages(every)


def test_runs_read_a_node_once_each() -> None:
    apart = [node([0, 2, 3, 6], 0, 10, 0)]
    assert saved_pages(apart) == 30
    assert saved_pages(apart, np.arange(7)) == 10  # three runs
    assert saved_pages(apart, np.array([0, 2, 3, 6, 1, 4, 5])) == 30


# -- what pays ------------------------------------------------------------------------------------


def same_prefix(num_rows: int, num_tokens: int, page_size: int = 1) -> list[ScheduledRequest]:
    """Decodes behind one prefix of whole pages, each with a page of its own."""
    shared = np.arange(num_tokens // page_size, dtype=np.int32)
    return [
        ScheduledRequest(
            "", np.ones(1, np.int32), num_tokens, np.append(shared, np.int32(900_000 + at)), None
        )
        for at in range(num_rows)
    ]


def test_the_crossover_is_that_of_the_formula() -> None:
    cost = CascadeCost(16_384, 8)
    for num_rows, num_tokens in ((2, 16_384), (17, 1_024), (65, 256), (5, 4_096)):
        for missing, is_shared in ((0, True), (1, False)):
            rows = same_prefix(num_rows, num_tokens - missing)
            assert bool(find_nodes(host_of(rows, 1), 1, cost)) == is_shared
    assert not cost.may_pay(np.array([50_000]))
    assert not cost.may_pay(np.array([50_000, 9_000, 7_000]))
    assert cost.may_pay(np.array([50_000, 9_000, 8_000]))


def test_nodes_of_a_level_share_its_launches() -> None:
    """Each saves less than a level costs, together more; but one may still be too short."""
    rows = []
    for at, num_tokens in enumerate((400, 300, 200, 9)):
        for row in same_prefix(2, num_tokens):
            rows.append(row._replace(page_ids=row.page_ids + np.int32(1000 * at)))
    host = host_of(rows, 1)
    for least, merge, expected in (
        (900, 8, [400, 300, 200]),
        (901, 8, []),
        (901, 4, [400, 300, 200, 9]),
        (500, 120, [400, 300]),
        (1_000, 0, []),
    ):
        nodes = find_nodes(host, 1, CascadeCost(least, merge))
        assert [one.end for one in nodes] == expected


def test_levels_that_do_not_pay_are_left_to_those_below() -> None:
    tree = [
        node([0, 1, 2, 3, 4], 0, 10, 0),  # saves 40 pages
        node([0, 1, 2], 10, 12, 1),  # 4, and its neighbour 30
        node([3, 4], 10, 40, 1),
        node([0, 1], 12, 30, 2),  # 18
    ]
    assert plain(drop_levels(tree, 18)) == plain(tree)
    assert plain(drop_levels(tree, 19)) == plain(tree[:3])
    assert plain(drop_levels(tree, 35)) == plain(tree[:1])
    assert drop_levels(tree, 41) == []
    short = [node([0, 1, 2, 3], 0, 2, 0), node([0, 1], 2, 50, 1), node([2, 3], 2, 60, 1)]
    assert plain(drop_levels(short, 7)) == [([0, 1], 0, 50, 0), ([2, 3], 0, 60, 0)]


def test_rows_that_lie_apart_may_not_pay_in_a_graph() -> None:
    rows, others = same_prefix(3, 100), same_prefix(2, 7)
    for table, one in zip((400, 500), others, strict=True):
        one.page_ids[:] += table
    together = [*rows, *others]
    apart = [rows[0], others[0], rows[1], others[1], rows[2]]
    for mixed, in_place in ((together, True), (apart, False)):
        host = host_of(mixed, 1)
        finder = NodeFinder(1, CascadeCost(200, 0))
        assert len(finder.find(host, 1)) == 1
        assert finder.pays_in_place(host) == in_place
    assert not NodeFinder(1, FREE).pays_in_place(host_of(same_prefix(1, 100), 1))
    assert not NodeFinder(1, None).pays_in_place(host_of(together, 1))


# -- graphs ---------------------------------------------------------------------------------------


def decodes_of(rows: list[ScheduledRequest]) -> list[ScheduledRequest]:
    """The same histories; the last token of each is the new one."""
    return [row._replace(start=row.end - 1, token_ids=row.token_ids[-1:]) for row in rows]


def check_graph(
    rows: list[ScheduledRequest], page_size: int, kernel_page_size: int, num_groups: int
) -> CudaAttentionPlan:
    """Padded to more rows than there are; real ones see their own cells, others one of page 0."""
    host = host_of(rows, page_size)
    shape = GraphShape(len(rows) + 3, host.kv_indptr[-1] * page_size + 3, num_groups)
    nodes = find_nodes(host, page_size, FREE, 1)
    plan = graph_plan(host, page_size, nodes, kernel_page_size, shape)
    found = cells_of_paged(plan, host, kernel_page_size)
    expected = [sorted(cells) for cells in expected_cells(rows, page_size)]
    assert [sorted(cells) for cells in found[: len(rows)]] == expected
    assert found[len(rows) :] == [[0]] * 3
    assert plan.order is None
    for part, count in zip(
        (*plan.unique, *plan.shared), (shape.num_rows, num_groups), strict=num_groups > 0
    ):
        assert (part.first, part.end, part.num_requests) == (0, shape.num_rows, count)
    return plan


@pytest.mark.parametrize("num_groups", [0, 2, 3, 5, 9, 40])
@pytest.mark.parametrize(("page_size", "kernel_page_size"), [(1, 1), (2, 2), (16, 4)])
def test_graphs_are_padded(page_size: int, kernel_page_size: int, num_groups: int) -> None:
    num_shared = 0
    for seed in range(20):
        rows = decodes_of(random_rows(random.Random(seed), page_size))
        plan = check_graph(rows, page_size, kernel_page_size, num_groups)
        num_shared += any(part.num_pages for part in plan.shared)
    assert (num_shared > 0) == (num_groups >= 3)


def test_a_full_graph_keeps_the_ranges_of_the_batch() -> None:
    host = host_of(same_prefix(4, 10), 1)
    plan = graph_plan(host, 1, [], 1, GraphShape(4, 44, 0))
    assert plan.unique[0].kv_indices == slice(0, 44)
    with pytest.raises(ValueError, match="44 pages do not fit a graph of 43 pages"):
        graph_plan(host, 1, [], 1, GraphShape(4, 43, 0))
    with pytest.raises(ValueError, match="4 rows of 4 tokens do not fit a graph of 3 rows"):
        graph_plan(host, 1, [], 1, GraphShape(3, 99, 0))
    long = host_of(
        [ScheduledRequest("", np.ones(2, np.int32), 0, np.arange(2, dtype=np.int32), None)], 1
    )
    with pytest.raises(ValueError, match="1 rows of 2 tokens"):
        graph_plan(long, 1, [], 1, GraphShape(3, 99, 0))


def test_what_saves_most_is_shared_where_not_all_fits() -> None:
    rows = []
    for at, num_tokens in enumerate((20, 50, 40)):
        for row in same_prefix(3, num_tokens):
            rows.append(row._replace(page_ids=row.page_ids + np.int32(100 * at)))
    host = host_of(rows, 1)
    nodes = find_nodes(host, 1, FREE, 1)
    assert len(nodes) == 3
    for num_groups, expected in ((7, [20, 50, 40]), (5, [50, 40]), (3, [50]), (2, [])):
        plan = graph_plan(host, 1, nodes, 1, GraphShape(12, 400, num_groups))
        (level,) = plan.shared
        assert [n for n in level.kv_lens.tolist() if n] == expected
        assert sum(level.kv_lens > 0) == len(expected)


def test_groups_of_a_graph_hold_a_prefix_of_all() -> None:
    for num_rows in (2, 3, 4, 8, 64, 256):
        shape = GraphShape.of_rows(num_rows, num_rows * 31, num_levels=1)
        assert 3 <= shape.num_groups <= num_rows + 1
        host = host_of(same_prefix(num_rows, 30), 1)
        nodes = find_nodes(host, 1, FREE, 1)
        (level,) = graph_plan(host, 1, nodes, 1, shape).shared
        assert level.num_pages == 30


# -- pages as smaller ones ------------------------------------------------------------------------


def test_page_views() -> None:
    for size in (1, 2, 16, 60, 64):
        assert choose_kernel_page_size(size) == size
    for size, kernel_page_size in ((128, 64), (80, 40), (4096, 64), (67, 1)):
        assert choose_kernel_page_size(size) == kernel_page_size <= MAX_KERNEL_PAGE_SIZE
    assert [choose_kernel_page_size(16, wanted) for wanted in (1, 4, 16)] == [1, 4, 16]
    for wanted in (0, 3, 32):
        with pytest.raises(ValueError, match="pages of 16 tokens cannot be read"):
            choose_kernel_page_size(16, wanted)


# -- rows as the scheduler makes them -------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_rows_of_the_real_cache(page_size: int) -> None:
    """Plans hold in every step."""
    num_shared, num_graphs = 0, 0
    for rows in scheduled_rows(page_size):
        nodes = find_nodes(host_of(rows, page_size), page_size, FREE)
        num_shared += len(check_plan(rows, page_size, nodes, page_size).shared)
        decodes = [row for row in rows if len(row.token_ids) == 1]
        if decodes:
            plan = check_graph(decodes, page_size, page_size, num_groups=5)
            num_graphs += any(part.num_pages for part in plan.shared)
    assert num_shared > 10
    assert num_graphs > 3
