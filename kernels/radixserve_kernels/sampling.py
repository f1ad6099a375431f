"""Sampling in torch operations, on any device: temperature, filters, and one token for each row.

The device kernels' reference, and the sampler of the CPU where no compiled code serves a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOP_P_CANDIDATES = 512  # sorted first for top_p; more of them only where they fall short
NUM_BEST = 128  # tokens listed first, where the filters may keep fewer
EXP_ERROR = 1e-5  # more than the relative error of a probability in float32
BLOCK = 256  # tokens whose probabilities are summed first when a token is sampled
BEST_BLOCK = 64  # tokens whose largest value is taken first when the best ones are listed


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row: int64 [S], 0 where the best logit is not finite, and whether it
    is, bool [S].

    logits [S, V] float32; temperature [S] float32 (0: the argmax); top_k [S] int32 (0, or V and
    more: all); top_p [S] float64 (1: all); min_p [S] float32 (0: all); uniform [S] float64 in
    (0, 1). Tokens that tie with the last one kept are kept too.

    The sample inverts the cumulative distribution in the order of the vocabulary, so that tokens of
    nearly equal probability never trade places.
    """
    best = logits.amax(-1)  # NaN where any logit is
    is_finite = best.isfinite()
    rows = (is_finite & (temperature > 0)).nonzero()[:, 0]
    if len(rows) == len(logits) > 0:
        kept = scale_and_filter(logits, best, temperature, top_k, top_p, min_p)
        return invert_distribution(kept.softmax(-1), uniform), is_finite
    token_ids, is_finite = argmax(logits)
    if len(rows):
        columns = (logits, temperature, top_k, top_p, min_p, uniform)
        sampled, _ = sample(*(column.index_select(0, rows) for column in columns))
        token_ids.index_copy_(0, rows, sampled)
    return token_ids, is_finite


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first maximum of each row of logits [S, V], 0 where it is not finite, and whether it is:
    int64 [S], bool [S]."""
    if logits.is_cpu:
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))  # far faster than torch's
        best = logits.gather(1, token_ids[:, None])[:, 0]  # NaN where any logit is
    else:
        best = logits.amax(-1)
        token_ids = (logits == best[:, None]).int().argmax(-1)
    is_finite = best.isfinite()
    return torch.where(is_finite, token_ids, 0), is_finite


def scale_and_filter(
    logits: Tensor, best: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Scaled logits [S, V] with the tokens that the filters drop at -inf: those that
    `filter_tokens` returns, bit by bit.

    best [S]: the best logit of each row, finite. Other columns as in `sample`. Rows whose filters
    may keep few tokens are tried with their best ones first.
    """
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if not bool(is_filtered.any()):
        return _scaled(logits, best, temperature)
    may_keep_few = is_filtered & (top_k < NUM_BEST)
    rows = may_keep_few.nonzero()[:, 0]
    if not len(rows) or logits.shape[1] < 4 * NUM_BEST:
        return filter_tokens(_scaled(logits, best, temperature), top_k, top_p, min_p)
    columns = (logits, best, temperature, top_k, top_p, min_p)
    if len(rows) == len(logits):
        kept, is_whole = filter_best_tokens(*columns)
    else:
        kept, is_whole = torch.empty_like(logits), torch.zeros_like(is_filtered)
        some = filter_best_tokens(*(column.index_select(0, rows) for column in columns))
        kept.index_copy_(0, rows, some[0])
        is_whole.index_copy_(0, rows, some[1])
    rest = (~is_whole).nonzero()[:, 0]
    if not len(rest):
        return kept
    logits, best, temperature, *filters = (column.index_select(0, rest) for column in columns)
    return kept.index_copy_(0, rest, filter_tokens(_scaled(logits, best, temperature), *filters))


def _scaled(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """The best logit goes to 0 first: a tiny temperature makes -inf of the others, never NaN."""
    return (logits - best[:, None]).div_(temperature[:, None])


def filter_best_tokens(
    logits: Tensor, best: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """`scale_and_filter` of rows that each have a filter, by their NUM_BEST best tokens: [n, V].
    And [n] bool: whether these sufficed; other rows are undefined. top_k < NUM_BEST.

    Probabilities are those of whole rows, so that each sum is rounded as in `filter_tokens`.
    """
    values, ids = best_tokens(logits, NUM_BEST)  # [n, NUM_BEST]
    scaled = _scaled(values, best, temperature)
    is_counted, has_top_p = top_k > 0, top_p < 1
    last = torch.where(is_counted, top_k.long(), NUM_BEST)[:, None] - 1
    is_kept = (scaled >= min_p.log()[:, None]) & (scaled >= scaled.gather(1, last))
    is_kept &= scaled > -torch.inf
    is_whole = ~is_kept[:, -1]  # else tokens that are not listed may be kept as well
    if not bool(has_top_p.any()):
        return _only(logits, ids, scaled, is_kept), is_whole
    is_open = has_top_p & ~is_counted & ~is_whole  # top_p may still drop those
    rows = is_open.nonzero()[:, 0]
    if len(rows) == len(logits):
        kept = _filter_min_p(_scaled(logits, best, temperature), min_p)
    else:
        kept = _only(logits, ids, scaled, is_kept)
        logits, best, temperature, least = (
            column.index_select(0, rows) for column in (logits, best, temperature, min_p)
        )
        kept.index_copy_(0, rows, _filter_min_p(_scaled(logits, best, temperature), least))
    probs = kept.softmax(-1).gather(1, ids)
    ordered = probs.sort(-1, descending=True).values
    num_kept = (ordered.double().cumsum(-1) < top_p[:, None]).sum(-1, keepdim=True) + 1
    floor = ordered.gather(1, (num_kept - 1).clamp(max=NUM_BEST - 1))
    is_kept &= (probs >= floor) | ~has_top_p[:, None]
    is_listed = floor[:, 0] > ordered[:, -1] * (1 + EXP_ERROR)  # no other token is as likely
    is_whole = (is_whole | is_open) & (is_listed | ~has_top_p)
    return _only(kept, ids, scaled, is_kept), is_whole


def _only(like: Tensor, ids: Tensor, scaled: Tensor, is_kept: Tensor) -> Tensor:
    """[n, V]: the `scaled` [n, k] of the tokens `ids` that are kept, and -inf."""
    everything = torch.full_like(like, -torch.inf)
    return everything.scatter_(1, ids, scaled.masked_fill(~is_kept, -torch.inf))


def filter_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scaled logits [S, V], the best of each row 0, with the tokens that min_p, top_k and top_p
    drop at -inf: columns [S], as in `sample`."""
    logits = _filter_min_p(logits, min_p)
    is_counted = (top_k > 0) & (top_k < logits.shape[1])
    rows = (is_counted | (top_p < 1.0)).nonzero()[:, 0]
    if not len(rows):
        return logits
    top_k = top_k.long().masked_fill(~is_counted, 0)
    if len(rows) == len(logits):
        return _filter_top_p(_filter_top_k(logits, top_k), top_p)
    some, top_k, top_p = (column.index_select(0, rows) for column in (logits, top_k, top_p))
    return logits.index_copy(0, rows, _filter_top_p(_filter_top_k(some, top_k), top_p))


def _filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    if not bool((min_p > 0).any()):
        return logits
    return logits.masked_fill(logits < min_p.log()[:, None], -torch.inf)


def _filter_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """top_k [S] int64; 0 keeps all."""
    most = int(top_k.max())
    if not most:
        return logits
    last = top_k[:, None] - 1  # -1 where all are kept
    floor = logits.topk(most, -1).values.gather(1, last.clamp(min=0))
    return logits.masked_fill((logits < floor) & (last >= 0), -torch.inf)


def _filter_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest set of best tokens with at least this probability; 1 keeps all."""
    wanted = top_p[:, None].double()
    if not bool((wanted < 1).any()):
        return logits
    probs = logits.softmax(-1)
    num_best = min(TOP_P_CANDIDATES, logits.shape[1])
    while True:
        best = probs.topk(num_best, -1).values  # [S, num_best]
        mass = best.double().cumsum(-1)
        if num_best == logits.shape[1] or bool(((mass[:, -1:] >= wanted) | (wanted == 1)).all()):
            break
        num_best = min(num_best * 8, logits.shape[1])
    num_kept = (mass < wanted).sum(-1, keepdim=True) + 1  # the one that reaches `wanted` as well
    floor = best.gather(1, (num_kept - 1).clamp(max=num_best - 1))
    return logits.masked_fill((probs < floor) & (wanted < 1), -torch.inf)


def invert_distribution(probs: Tensor, uniform: Tensor) -> Tensor:
    """First token of each row up to which more than `uniform` of the row's probability lies.

    probs [S, V] float32, not all zero; uniform [S] float64 in (0, 1); returns [S] int64. A token of
    probability zero is never returned. Searches the block of tokens first, then the token in it.
    """
    if probs.shape[1] % BLOCK:
        probs = F.pad(probs, (0, -probs.shape[1] % BLOCK))
    blocks = probs.reshape(len(probs), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)  # [S, V / BLOCK]
    mass = sums.cumsum(-1)
    point = _below(uniform[:, None] * mass[:, -1:], mass[:, -1:])
    block = torch.searchsorted(mass, point, right=True)  # [S, 1]
    before = mass.gather(1, block) - sums.gather(1, block)
    rows = torch.arange(len(probs), device=probs.device)
    inner = blocks[rows, block[:, 0]].double().cumsum(-1)  # [S, BLOCK]
    within = torch.searchsorted(inner, _below(point - before, inner[:, -1:]), right=True)
    return (block * BLOCK + within)[:, 0]


def _below(point: Tensor, total: Tensor) -> Tensor:
    """`point`, pushed below `total` where rounding brought it there, and not below zero."""
    zero = torch.zeros_like(total)
    return torch.minimum(point, torch.nextafter(total, zero)).clamp(min=0)


def best_tokens(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, best first, and their token ids: [S, V] -> two
    [S, count].

    As `topk`, and many times as fast in a large vocabulary: they lie in the `count` blocks with the
    largest maxima. NaN counts as the largest.
    """
    vocab_size = values.shape[1]
    block = BEST_BLOCK
    if vocab_size < 2 * count * block:
        best = values.topk(count, -1)
        return best.values, best.indices
    num_blocks = vocab_size // block
    blocks = values[:, : num_blocks * block].reshape(len(values), num_blocks, block)
    best_blocks = blocks.amax(-1).topk(count, -1).indices[:, :, None]  # [S, count, 1]
    index = torch.arange(vocab_size, device=values.device)
    some = blocks.gather(1, best_blocks.expand(-1, -1, block)).flatten(1)
    ids = (best_blocks * block + index[:block]).flatten(1)
    rest = index[num_blocks * block :].expand(len(values), -1)
    best = torch.cat((some, values[:, num_blocks * block :]), 1).topk(count, -1)
    return best.values, torch.cat((ids, rest), 1).gather(1, best.indices)
