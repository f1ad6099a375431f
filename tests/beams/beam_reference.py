"""Beam search without any cache, scheduler or batch: all beams, all tokens, one sorted list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixserve.request import BeamParams, StopCheck

Table = Callable[[list[int]], np.ndarray]  # tokens so far -> [V] float32 scores of the next one
_NONE = -1e9  # what no beam and no answer are worth


@dataclass(frozen=True, kw_only=True)
class StoppedBeams(BeamParams):
    """With stop strings, or what stands for them."""

    is_stopped: StopCheck | None = None


@dataclass
class Answer:
    score: float
    token_ids: list[int]
    reason: str


def search(
    table: Table,
    prompt: list[int],
    beams: BeamParams,
    end_ids: frozenset[int],
    max_output: int,
    min_tokens: int = 0,
    gaps: list[float] | None = None,
) -> list[Answer]:
    """The rules as transformers has them, written down once more; best first.

    `gaps` takes the distances of totals that decided: between neighbours among the best candidates
    of each step and among the answers.
    """
    width, penalty = beams.width, beams.length_penalty
    num_kept = max(2, 1 + len(end_ids)) * width
    running: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    answers: list[Answer] = []
    for num_output in range(1, max_output + 1):
        candidates = []
        for at, (total, output) in enumerate(running):
            scores = np.array(table(prompt + output))
            if num_output - 1 < min_tokens:
                scores[list(end_ids)] = -np.inf
            order = np.argsort(-scores, kind="stable").tolist()
            candidates += [
                (-(total + scores[token]), at, rank, [*output, token])
                for rank, token in enumerate(order)
            ]
        candidates.sort(key=lambda one: one[:3])
        if gaps is not None:
            nearest = np.array([float(one[0]) for one in candidates[: num_kept + 1]])
            gaps.append(float((nearest[1:] - nearest[:-1]).min()))
        running = []
        for place, (minus, _, _, output) in enumerate(candidates[:num_kept]):
            if -minus <= _NONE:
                continue
            reason = ""
            if output[-1] in end_ids or _is_stopped(beams, prompt, output):
                reason = "stop"
            elif num_output == max_output:
                reason = "length"
            if not reason:
                running.append((-minus, output))
            elif place < width:
                answers.append(Answer(-minus / num_output**penalty, output, reason))
        running = running[:width]
        answers.sort(key=lambda one: -one.score)
        if gaps is not None:
            pairs = pairwise(answers)
            gaps += [(a.score - b.score) * len(b.token_ids) ** penalty for a, b in pairs]
        answers = answers[:width]
        if not running:
            break
        if len(answers) == width:
            is_long = beams.early_stopping == "never" and penalty > 0
            divisor = (max_output if is_long else num_output) ** penalty
            best = running[0][0] / divisor
            if gaps is not None:
                gaps.append(abs(float(best - answers[-1].score)) * divisor)
            if beams.early_stopping is True or best <= answers[-1].score:
                break
    return answers


def _is_stopped(beams: BeamParams, prompt: list[int], output: list[int]) -> bool:
    is_stopped: StopCheck | None = getattr(beams, "is_stopped", None)
    if is_stopped is None:
        return False
    return is_stopped(np.array(prompt + output[:-1], np.int32), output[-1])
