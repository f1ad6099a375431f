"""`ForcedTokens`: what a request's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.grammar.matcher import GrammarMatcher


class ForcedTokens(DraftSource):
    """Drafts the tokens of the only text that can follow. With jump_forward these are the only ones
    that can be sampled; without it the model may divide that text into other ones."""

    name = "grammar"
    is_sure = True

    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        matcher = context.matcher
        if not isinstance(matcher, GrammarMatcher):
            return None
        return matcher.forced_ids(context.output)[:most]
