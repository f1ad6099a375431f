"""Token counts in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixserve.output import Completion

Group = Sequence[Completion]  # the completions of a prompt


def as_groups(answers: Sequence[Completion | list[Completion]]) -> list[list[Completion]]:
    return [answer if isinstance(answer, list) else [answer] for answer in answers]


def grouped(completions: Mapping[int, Completion], size: int) -> list[list[Completion]]:
    """By index, `size` of each prompt -> by prompt."""
    starts = range(0, len(completions), size)
    return [[completions[at + sample] for sample in range(size)] for at in starts]


def usage_of(groups: Iterable[Group]) -> dict[str, Any]:
    """A prompt counts once, as its first completion found it; what was generated counts each time.

    cached_tokens is exact: so many tokens of the prompts were not computed for this request.
    """
    prompt = cached = generated = 0
    for group in groups:
        prompt += group[0].usage.prompt_tokens
        cached += group[0].usage.cached_tokens
        generated += sum(one.usage.completion_tokens for one in group)
    return usage_body(prompt, cached, generated)


def usage_body(prompt: int, cached: int, generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
