"""Random ragged batches of rows over a filled pool, and their attention written out row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from radixserve.attention.base import PLAIN, AttentionBackend, AttentionFeatures, GivenRows
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest

CPU = torch.device("cpu")


class Case:
    """Rows with random prefixes in a filled pool, and the right answer."""

    def __init__(
        self, lengths, page_size, heads, kv_heads, dim, seed=0, dtype=torch.float32, num_pages=0
    ):
        self.generator = np.random.default_rng(seed)
        self.lengths, self.page_size = lengths, page_size
        pages = [-(-(start + new) // page_size) for start, new in lengths]
        ids = self.generator.permutation(max(num_pages, sum(pages) + 3)).astype(np.int32)
        bounds = np.cumsum([0, *pages])
        self.rows = tuple(
            ScheduledRequest(
                "r", np.ones(new, np.int32), start, ids[bounds[i] : bounds[i + 1]], None
            )
            for i, (start, new) in enumerate(lengths)
        )
        torch.manual_seed(seed)
        self.kv = torch.randn(2, 2, len(ids), page_size, kv_heads, dim).to(dtype)
        total = sum(new for _, new in lengths)
        self.q = torch.randn(total, heads, dim).to(dtype)
        self.k, self.v = torch.randn(2, total, kv_heads, dim).to(dtype)
        self.batch = build_forward_batch(self.rows, page_size, CPU)

    def look_ahead(self, *pictures):
        """The positions [start, end) of each see each other, in every row that computes them."""
        host, own = self.batch.host, self.batch.positions.numpy()
        ends, last_seen = np.repeat(host.seq_lens, np.diff(host.qo_indptr)), own.copy()
        for start, end in pictures:
            last_seen[(own >= start) & (own < end) & (ends >= end)] = end - 1
        none = GivenRows(np.empty(0, np.int64), torch.empty(0, 1, 1), last_seen=last_seen)
        self.batch = replace(self.batch, given=none)

    def expected(self, layer, scale=None, features=PLAIN):
        """ScheduledRequest by row in float64, and the pool as it must be afterwards."""
        kv, outs, first = self.kv.clone(), [], 0
        scale = scale or 1 / math.sqrt(self.q.shape[-1])
        for row, (start, new) in zip(self.rows, self.lengths, strict=True):
            slots = np.concatenate(
                [np.arange(p * self.page_size, (p + 1) * self.page_size) for p in row.page_ids]
            )[: start + new]
            k_slots, v_slots = (kv[layer, i].flatten(0, 1) for i in (0, 1))
            k_slots[slots[start:]] = self.k[first : first + new]
            v_slots[slots[start:]] = self.v[first : first + new]
            group = self.q.shape[1] // self.k.shape[1]
            k, v = (
                x[slots].double().repeat_interleave(group, 1).transpose(0, 1)
                for x in (k_slots, v_slots)
            )
            q = self.q[first : first + new].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * scale
            last_seen = torch.arange(start, start + new)
            if features.bidirectional and self.batch.given is not None:
                last_seen = torch.from_numpy(self.batch.given.last_seen[first : first + new])
            hidden = torch.arange(start + new) > last_seen[:, None]
            if cap := features.logits_soft_cap:
                scores = torch.tanh(scores / cap) * cap
            firsts = [first_seen(features, start + i) for i in range(new)]
            hidden |= torch.arange(start + new) < torch.tensor(firsts)[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
            if features.sinks is not None:
                sinks = features.sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat((scores, sinks), -1)
            outs.append((scores.softmax(-1)[..., : start + new] @ v).transpose(0, 1))
            first += new
        return torch.cat(outs), kv


class SharedCase(Case):
    """Rows whose leading pages are the same ones: `groups` says which rows share how many."""

    def __init__(self, lengths, page_size, groups, **shape):
        super().__init__(lengths, page_size, **shape)
        for rows, count in groups:
            for row in rows[1:]:
                self.rows[row].page_ids[:count] = self.rows[rows[0]].page_ids[:count]
        self.batch = build_forward_batch(self.rows, page_size, CPU)


SHARED = {
    "decodes": ([(64, 1), (70, 1), (99, 1)], [((0, 1, 2), 32)]),
    "decodes right behind": ([(64, 1), (64, 1), (64, 1)], [((0, 1, 2), 32)]),
    "chunks": ([(64, 5), (64, 9), (70, 3), (64, 40)], [((0, 1, 2, 3), 32)]),
    "a long chunk among them": ([(64, 150), (66, 1), (64, 2)], [((0, 1, 2), 32)]),
    "two groups and strangers": (
        [(64, 1), (0, 20), (80, 7), (30, 1), (64, 3), (90, 1), (0, 1)],
        [((0, 4), 32), ((2, 5), 40)],
    ),
    "different depths": ([(64, 1), (80, 1), (80, 1)], [((0, 1, 2), 20), ((1, 2), 40)]),
    "three levels": (
        [(160, 1), (171, 1), (200, 5), (160, 1), (130, 9), (66, 1), (64, 70), (5, 1)],
        [(tuple(range(7)), 32), (tuple(range(5)), 60), ((0, 1), 80), ((2, 3), 70)],
    ),
}

LENGTHS = {
    "one decode": [(9, 1)],
    "first token alone": [(0, 1)],
    "decodes": [(5, 1), (40, 1), (0, 1), (17, 1)],
    "equal decodes": [(7, 1)] * 4,
    "one prefill": [(0, 33)],
    "prefills": [(0, 33), (0, 2), (0, 31), (0, 64)],
    "chunks": [(3, 7), (30, 2), (16, 16), (1, 15)],
    "chunks and decodes": [(3, 7), (30, 1), (0, 9), (0, 1), (16, 16)],
    "long chunk": [(5, 300)],
    "long chunks": [(5, 300), (300, 290), (1, 257)],
    "everything": [(0, 20), (5, 1), (9, 30), (100, 1), (0, 1), (0, 19), (3, 2), (64, 17), (31, 1)],
}


RUNS = {  # pages of a sequence
    "one": list(range(5, 27)),
    "two": [*range(30, 43), *range(3, 12)],
    "many": [0, 9, 8, 7, *range(20, 30), 2, 3, 4, 40, 42, 44, 50, 51],
}


def run(
    backend: AttentionBackend,
    case: Case,
    layer: int = 1,
    scale: float | None = None,
    features: AttentionFeatures = PLAIN,
) -> torch.Tensor:
    """[T, Hq, D]; the backend's pool is written to."""
    backend.plan(case.batch)
    return store_and_attend(backend, case.q, case.k, case.v, layer, scale, features)


def store_and_attend(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int = 0,
    scale: float | None = None,
    features: AttentionFeatures = PLAIN,
) -> torch.Tensor:
    """What a model does in a layer of the planned step."""
    backend.store(k, v, layer)
    return backend.attend(q, layer, scale, features)


def first_seen(features: AttentionFeatures, position: int) -> int:
    """The first position that a query at `position` sees."""
    window, chunk = features.span
    first = position + 1 - window if window else 0
    return max(first, position // chunk * chunk if chunk else 0, 0)
