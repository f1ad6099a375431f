"""From logits to tokens, for all sampled rows of a step at once.

Knows what each row asks for (`SampleSpec`) and keeps nothing between calls: a row's token depends
on its own logits, parameters, seed and index alone, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.runner.cpu_sampler import (
    broken_output,
    is_temperature_only,
    sample_greedy,
    sample_temperature_only,
)
from radixserve.runner.grammar_masks import GrammarMasks, StepMasks, begin_masks
from radixserve.runner.logits_processing import column, process_logits, run_processors
from radixserve.runner.random_stream import uniform_numbers
from radixserve.schedule import Candidates, SampleOutput, SampleSpec
from radixserve_kernels.cpu_library import is_loaded

TOP_P_CANDIDATES = 512  # sorted first for top_p; more of them only where they fall short
SCORED_AT_ONCE = 512  # rows of logits
SAMPLED_AT_ONCE = 1 << 19  # logits on the CPU: what is made of them stays in its caches
BLOCK = 256  # tokens whose probabilities are summed first when a token is sampled
BEST_BLOCK = 64  # tokens whose largest value is taken first when the best ones are listed

SampleFunction = Callable[[Tensor, Sequence[SampleSpec], GrammarMasks | None], list[SampleOutput]]

_IS_GREEDY_ONLY = attrgetter("is_greedy_only")
_TAKES_BEST, _BANNED_IDS = attrgetter("params.takes_best"), attrgetter("banned_ids")
_NUM_CANDIDATES, _MATCHER = attrgetter("num_candidates"), attrgetter("matcher")


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], begun: StepMasks | None = None
) -> list[SampleOutput]:
    """Sample one token a row, or list the best ones where they are asked for (of a beam).

    logits [S, V] float32, row r for specs[r]; left unchanged. Order: logits_processing.py, then
    temperature, min_p, top_k, top_p, the sampling. Log-probabilities are those of `logits`.
    A row without a finite best logit gets an error instead of a token; others are not touched.
    begun: the masks of the specs' grammars, where they are being computed already.
    """
    if not specs:
        return []
    if logits.is_cpu and are_greedy_only(specs):
        return sample_greedy(logits)
    if begun is None:
        begun = begin_masks(specs, logits.shape[1])
    masks = None if begun is None else begun.get()
    outputs = _sample(logits, specs, masks)
    if masks is not None:
        masks.note_outputs(outputs)
    return outputs


def _sample(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarMasks | None
) -> list[SampleOutput]:
    """Beams, rows for the compiled code, and others: each kind in a pass of its own."""
    is_native = logits.is_cpu and is_loaded()
    kinds: dict[SampleFunction, list[int]] = {}
    for row, spec in enumerate(specs):
        function: SampleFunction = best_candidates if spec.num_candidates else _sample_in_parts
        if is_native and is_temperature_only(spec):
            function = sample_temperature_only
        kinds.setdefault(function, []).append(row)
    if len(kinds) == 1:
        return next(iter(kinds))(logits, specs, masks)
    outputs = [SampleOutput(-1, None, ())] * len(specs)
    for function, rows in kinds.items():
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        own = None if masks is None else masks.select(rows)
        sampled = function(logits.index_select(0, index), [specs[row] for row in rows], own)
        for row, output in zip(rows, sampled, strict=True):
            outputs[row] = output
    return outputs


def _sample_in_parts(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarMasks | None
) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    num_rows = max(1, SAMPLED_AT_ONCE // logits.shape[1]) if logits.is_cpu else len(specs)
    for first in range(0, len(specs), num_rows):
        rows = slice(first, first + num_rows)
        own = None if masks is None else masks.select(range(len(specs))[rows])
        outputs += _sample_rows(logits[rows], specs[rows], own)
    return outputs


def _sample_rows(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarMasks | None
) -> list[SampleOutput]:
    processed, failed = run_processors(logits, specs)
    changed = process_logits(processed, specs, masks)
    best = changed.amax(-1)  # [S] NaN where any logit is
    broken = (~best.isfinite()).nonzero()[:, 0].tolist()
    if broken:  # nothing can be sampled there, and nothing there may disturb the other rows
        changed = changed.index_fill(0, torch.tensor(broken, device=logits.device), 0.0)
    rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if len(rows) == len(specs):
        token_ids = sample_tokens(changed, specs)  # [S]
    else:
        token_ids = changed.argmax(-1)
        if rows:
            index = torch.tensor(rows, device=logits.device)
            sampled = sample_tokens(changed.index_select(0, index), [specs[row] for row in rows])
            token_ids.index_copy_(0, index, sampled)
    outputs = _outputs(logits, token_ids, specs)
    for row in broken:
        outputs[row] = broken_output(float(best[row]))
    for row, output in failed.items():
        outputs[row] = output
    return outputs


def score(logits: Tensor, targets: IntArray, num_top_logprobs: int = 0) -> SampleOutput:
    """The log-probability of each target, and of the num_top_logprobs best tokens in its place.

    logits [k, V] float32, targets [k] token ids.
    """
    index = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    found = score_tensors(logits, index, num_top_logprobs)
    return scored_output(*(one.tolist() for one in found))


def score_tensors(logits: Tensor, targets: Tensor, num_top_logprobs: int) -> tuple[Tensor, ...]:
    """`score` on the device of the logits: scores [k] of targets [k] int64; and if there are any,
    the best log-probabilities [k, num_top_logprobs] and their token ids.

    Takes memory for SCORED_AT_ONCE rows of logits, not for all k.
    """
    found: list[list[Tensor]] = []
    num_top = min(num_top_logprobs, logits.shape[1])
    for rows, wanted in zip(
        logits.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True
    ):
        logprobs = rows.log_softmax(-1)
        found.append([logprobs.gather(1, wanted[:, None])[:, 0]])
        if num_top:
            found[-1] += logprobs.topk(num_top, -1)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def scored_output(
    scores: list[float],
    values: Sequence[Sequence[float]] = (),
    ids: Sequence[Sequence[int]] = (),
) -> SampleOutput:
    """The result of `score_tensors` as an output."""
    if any(math.isnan(one) for one in scores):
        return SampleOutput(
            -1, None, (), "no token can be scored: there are logits that are no numbers"
        )
    top = tuple(tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return SampleOutput(-1, None, (), None, tuple(scores), top)


def with_scores(output: SampleOutput | None, scored: SampleOutput) -> SampleOutput:
    """The output of a row that was sampled from (or not, None) and scored."""
    if output is None or scored.error is not None:
        return scored
    return output._replace(scores=scored.scores, top_scores=scored.top_scores)


def are_greedy_only(specs: Sequence[SampleSpec]) -> bool:
    """Whether each row's best logit decides, and nothing else is asked for. Every step asks: no row
    runs Python code of its own."""
    if all(map(_IS_GREEDY_ONLY, specs)):
        return True
    if not all(map(_TAKES_BEST, specs)) or any(map(_BANNED_IDS, specs)):
        return False
    return not any(map(_NUM_CANDIDATES, specs)) and not any(map(_MATCHER, specs))


def best_candidates(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarMasks | None = None
) -> list[SampleOutput]:
    """The best tokens of each row by their log-probability after penalties and bans.

    logits [S, V] float32, left unchanged. Penalties change log-probabilities here, not logits, and
    nothing is normalised again: so transformers' beam search has it. A row with a NaN or without a
    possible token gets an error.
    """
    norm = logits.logsumexp(-1, keepdim=True)  # [S, 1]
    num_best = min(max(spec.num_candidates for spec in specs), logits.shape[1])
    if any(spec.banned_ids or spec.params.changes_logits for spec in specs):
        changed = process_logits(logits - norm, specs, masks)
        scores, token_ids = best_tokens(changed, num_best)
        own = logits.gather(1, token_ids) - norm
    else:  # the best logits are the best tokens
        values, token_ids = best_tokens(logits, num_best)
        scores = own = values - norm
    top = _top_logprobs(logits, norm, specs)
    lists = [one.cpu().numpy() for one in (token_ids.to(torch.int32), scores, own)]  # [S, K] each
    outputs = []
    for row, (spec, best) in enumerate(zip(specs, lists[1][:, 0].tolist(), strict=True)):
        if not math.isfinite(best):
            outputs.append(broken_output(best))
            continue
        found = Candidates(*(one[row, : spec.num_candidates] for one in lists))
        outputs.append(SampleOutput(-1, None, top.get(row, ()), candidates=found))
    return outputs


def best_tokens(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, best first, and where they are: [S, V] -> two [S, count].

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
    places = blocks.amax(-1).topk(count, -1).indices[:, :, None]  # [S, count, 1]
    index = torch.arange(vocab_size, device=values.device)
    some = blocks.gather(1, places.expand(-1, -1, block)).flatten(1)
    ids = (places * block + index[:block]).flatten(1)
    rest = index[num_blocks * block :].expand(len(values), -1)
    best = torch.cat((some, values[:, num_blocks * block :]), 1).topk(count, -1)
    return best.values, torch.cat((ids, rest), 1).gather(1, best.indices)


def _top_logprobs(
    logits: Tensor, norm: Tensor, specs: Sequence[SampleSpec]
) -> dict[int, tuple[tuple[int, float], ...]]:
    """The most likely tokens of the rows that want to know them, by row: logits [S, V], norm [S, 1]
    the logarithm of the sum of their exponentials."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs]
    if not rows:
        return {}
    wanted = [min(specs[row].params.logprobs or 0, logits.shape[1]) for row in rows]
    index = torch.tensor(rows, device=logits.device)
    best, places = best_tokens(logits.index_select(0, index), max(wanted))
    values, ids = (best - norm.index_select(0, index)).tolist(), places.tolist()
    return {
        row: tuple(zip(ids[i][: wanted[i]], values[i][: wanted[i]], strict=True))
        for i, row in enumerate(rows)
    }


def sample_tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Temperature, filters and one token a row: logits [S, V] -> token ids [S] int64.

    The sampling inverts the cumulative distribution in the order of the vocabulary, so that tokens
    of nearly equal probability never trade places.
    """
    params = [spec.params for spec in specs]
    temperature = column(params, lambda p: p.temperature, logits)[:, None]
    # The best logit goes to 0 first: a tiny temperature then makes -inf of the others, never NaN.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    kept = filter_tokens(scaled, params)
    uniform = torch.from_numpy(uniform_numbers(specs)).to(logits.device)
    return invert_distribution(kept.softmax(-1), uniform)


def invert_distribution(probs: Tensor, uniform: Tensor) -> Tensor:
    """First token of each row up to which more than `uniform` of the row's probability lies.

    probs [S, V] float32, not all zero; uniform [S] float64 in (0, 1); returns [S] int64. A token of
    probability zero is never returned. First the block of tokens is found, then the token in it.
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


def filter_tokens(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scaled logits [S, V] with the tokens that min_p, top_k and top_p drop at -inf.

    Tokens that tie with the last one kept are kept too.
    """
    floor = torch.full_like(logits[:, :1], -torch.inf)  # [S, 1] least logit kept
    if any(p.min_p > 0 for p in params):
        log_min_p = column(params, lambda p: p.min_p, logits).log()[:, None]
        floor = logits.amax(-1, keepdim=True) + log_min_p
        logits = logits.masked_fill(logits < floor, -torch.inf)
    vocab_size = logits.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    rows = [r for r, p in enumerate(params) if top_k[r] or p.top_p < 1.0]
    if not rows:
        return logits
    index = torch.tensor(rows, device=logits.device)
    some = logits.index_select(0, index)
    some = _filter_top_k(some, [top_k[row] for row in rows])
    some = _filter_top_p(some, [params[row].top_p for row in rows])
    return logits.index_copy(0, index, some)


def _filter_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """0 keeps all."""
    if not any(top_k):
        return logits
    best = logits.topk(max(top_k), -1).values
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1  # -1 where all are kept
    floor = best.gather(1, last.clamp(min=0)).masked_fill(last < 0, -torch.inf)
    return logits.masked_fill(logits < floor, -torch.inf)


def _filter_top_p(logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """The smallest set of best tokens with at least this probability; 1 keeps all."""
    if not any(p < 1.0 for p in top_p):
        return logits
    wanted = torch.tensor(top_p, dtype=torch.float64, device=logits.device)[:, None]
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


def _outputs(logits: Tensor, token_ids: Tensor, specs: Sequence[SampleSpec]) -> list[SampleOutput]:
    chosen: list[int] = token_ids.tolist()
    outputs = [SampleOutput(token_id, None, ()) for token_id in chosen]
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not rows:
        return outputs
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits.index_select(0, index).log_softmax(-1)  # [rows, V]
    own = logprobs.gather(1, token_ids.index_select(0, index)[:, None])[:, 0].tolist()
    wanted = [min(specs[row].params.logprobs or 0, logits.shape[1]) for row in rows]
    values, ids = (best.tolist() for best in logprobs.topk(max(wanted), -1))
    for i, row in enumerate(rows):
        best = tuple(zip(ids[i][: wanted[i]], values[i][: wanted[i]], strict=True))
        outputs[row] = SampleOutput(chosen[row], own[i], best)
    return outputs
