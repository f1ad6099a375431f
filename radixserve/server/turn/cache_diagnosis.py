"""`TurnDiagnosis`: why a turn found less in the cache than an earlier one had left there.

Formats the diagnosis for OpenAI's and Anthropic's protocols.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import Decode, Diagnosis, diagnose, is_time
from radixserve.completion import Completion
from radixserve.server.gate.prompt_records import PromptParts, PromptRecord

# OpenAI's and Anthropic's reasons, by the part of the prompt that has changed.
_OPENAI_REASONS = {
    "tools": "tools_changed",
    "reasoning": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}
_ANTHROPIC_REASONS = {
    "tools": "tools_changed",
    "system": "system_changed",
    "date": "system_changed",
    "messages": "messages_changed",
    "answer": "messages_changed",
}


class TurnDiagnosis(NamedTuple):
    """A turn compared with an earlier one.

    part  the first part of the prompt that differs: "tools", "system", "messages", "answer" (of
          the earlier turn), "reasoning" or "verbosity" (variables of the template), "date" (that
          the template prints, where nothing else has changed); "" if none does
    """

    diagnosis: Diagnosis
    part: str

    @classmethod
    def of(
        cls,
        completion: Completion | None,
        prompt: IntArray,
        parts: PromptParts,
        previous: PromptRecord,
        decode: Decode,
    ) -> TurnDiagnosis:
        """Compare a turn with the answer in `previous` that it has the most tokens in common with.

        `completion` None: the turn has not ended, and the common tokens count as cached.
        """
        cached, miss = None, ""
        if completion is not None:
            cached = completion.usage.cached_tokens
            miss = "" if completion.miss is None else completion.miss.reason
        diagnosis, num_prompt = max(
            (
                (
                    diagnose(prompt, cached, miss, *answer.sequence(), decode),
                    len(answer.prompt_token_ids),
                )
                for answer in previous.completions
            ),
            key=lambda pair: pair[0].shared_tokens,
        )
        part = ""
        if diagnosis.reason == "diverged":
            part = parts.changed_since(previous.parts)
            in_answer = diagnosis.position >= num_prompt
            times = diagnosis.expected or "", diagnosis.found or ""
            if part == "messages" and in_answer:
                part = "answer"
            elif parts.goes_on_from(previous.parts) and all(map(is_time, times)):
                part = "date"
        return cls(diagnosis, part)

    def openai(self) -> dict[str, Any]:
        """`prompt_cache_diagnostics`."""
        diagnosis = self.diagnosis
        if diagnosis.reason == "hit":
            return {"type": "cache_hit"}
        if not self.part:  # the prompt has not changed: none of OpenAI's reasons applies
            return {"type": "unavailable", "detail": self._detail()}
        return {
            "type": "cache_miss",
            "reason": _OPENAI_REASONS.get(self.part, "input_changed"),
            "cache_missed_tokens": diagnosis.tokens_lost,
            "comparison_reusable_tokens": diagnosis.reusable_tokens,
            "detail": self._detail(),
        }

    def anthropic(self) -> dict[str, Any] | None:
        """`diagnostics`; None for a hit."""
        diagnosis = self.diagnosis
        if diagnosis.reason == "hit":
            return None
        kind = _ANTHROPIC_REASONS.get(self.part)
        reason: dict[str, Any] = {"type": "unavailable"}
        if kind is not None:
            reason = {"type": kind, "cache_missed_input_tokens": diagnosis.tokens_lost}
        return {"cache_miss_reason": reason, "detail": self._detail()}

    def _detail(self) -> dict[str, Any]:
        return {"part": self.part or None, **self.diagnosis._asdict()}


def begun_anthropic_diagnostics(diagnosis: TurnDiagnosis | None) -> dict[str, Any]:
    """`anthropic_diagnostics` at the start of a stream: the reason is null, not known yet, where
    the prompts do not differ."""
    return anthropic_diagnostics(diagnosis) or {"cache_miss_reason": None}


def openai_diagnostics(diagnosis: TurnDiagnosis | None) -> dict[str, Any]:
    """`prompt_cache_diagnostics`. `diagnosis` None: the earlier answer is unknown."""
    return {"type": "comparison_response_not_found"} if diagnosis is None else diagnosis.openai()


def anthropic_diagnostics(diagnosis: TurnDiagnosis | None) -> dict[str, Any] | None:
    """`diagnostics`; None for a hit. `diagnosis` None: the earlier message is unknown."""
    if diagnosis is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    return diagnosis.anthropic()
