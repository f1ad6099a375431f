"""Reranking: how relevant a model finds documents for a query, by its answer yes or no.

The document comes first in the prompt and the query after it, so that a document's K/V is computed
once for all queries, and found in the cache as long as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixserve.api.client import EngineClient
from radixserve.checks import check_text, shown
from radixserve.decisions import Question
from radixserve.errors import InvalidRequest
from radixserve.output import Usage
from radixserve.recipes.decisions import DecisionBatch

MAX_DOCUMENTS = 1_024
_STATEMENT = "The text above is relevant to this query: {query}"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document with its score."""

    index: int  # among the given documents
    relevance_score: float  # 0 to 1: the probability of yes, against no
    usage: Usage


class Reranking:
    """Checked documents and a query, as requests."""

    def __init__(
        self, client: EngineClient, query: object, documents: object, namespace: str = ""
    ) -> None:
        """Raises InvalidRequest."""
        if not isinstance(query, str) or not query.strip():
            raise InvalidRequest(f"query must be text, got {shown(query)}")
        if not isinstance(documents, Sequence) or isinstance(documents, str) or not documents:
            raise InvalidRequest(f"documents must be a list of texts, got {shown(documents)}")
        if len(documents) > MAX_DOCUMENTS:
            raise InvalidRequest(
                f"documents has {len(documents)} items; at most {MAX_DOCUMENTS} are allowed"
            )
        question = Question(_STATEMENT.format(query=check_text("query", query)))
        self._batch = DecisionBatch.joined(
            [
                DecisionBatch(client, _text_of(index, text), question, namespace)
                for index, text in enumerate(documents)
            ]
        )
        self.num_requests = self._batch.num_requests
        self.num_tokens = self._batch.num_tokens

    async def arun(self, max_in_flight: int, admit: Callable[[], object]) -> list[Ranked]:
        """Returns all documents, the most relevant first. The arguments are those of
        `DecisionBatch.arun`."""
        ranked = [
            Ranked(index, decision.probabilities[0], decision.usage)
            for index, decision in enumerate(await self._batch.arun(max_in_flight, admit))
        ]
        return sorted(ranked, key=lambda one: -one.relevance_score)  # stable


def _text_of(index: int, document: object) -> str:
    if not isinstance(document, str) or not document:
        raise InvalidRequest(f"documents[{index}] must be a non-empty text, got {shown(document)}")
    return document
