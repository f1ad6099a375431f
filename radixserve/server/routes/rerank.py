"""POST /rerank, /v1/rerank and /v2/rerank: documents by relevance, with Jina's and Cohere's
fields."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.errors import InvalidRequest
from radixserve.recipes.rerank import MAX_DOCUMENTS, Ranked, Reranking
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.state import AppState, namespace_of, request_id_of, server_of
from radixserve.server.prompt.prompt_input import in_thread_if
from radixserve.server.turn.decision_run import run_decisions
from radixserve.server.wire.body import Body, Bounded, Short
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import CacheFields

router = APIRouter(route_class=JsonRoute)
_AT_ONCE = 128  # engine requests of one call that are submitted at a time
_FEW = 4  # documents that are tokenised in the event loop


class TextDocument(Body):
    text: str


class RerankRequest(CacheFields):
    """Cohere's and Jina's fields. `max_tokens_per_doc` and the like are refused: no document is
    cut."""

    model: Short | None = None
    query: str
    documents: Bounded[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """The documents by relevance to the query, the most relevant first: the probability that the
    model answers yes. A document's K/V is computed once for all queries."""
    server = server_of(request)
    server.check_model(body.model)
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, f"top_n must be at least 1, got {body.top_n}", param="top_n")
    texts = [
        document if isinstance(document, str) else document.text for document in body.documents
    ]
    namespace = namespace_of(request, body)
    reranking = await in_thread_if(
        len(texts) > _FEW, partial(_read, server, body.query, texts, namespace)
    )
    ranked, _, counts = await run_decisions(request, reranking, _AT_ONCE)
    with_texts = body.return_documents is True
    return answer(
        {
            "id": f"rerank-{request_id_of(request)}",
            "model": server.name_of(namespace),
            "results": [_result(document, texts, with_texts) for document in ranked[: body.top_n]],
            "usage": counts,
        }
    )


def _read(server: AppState, query: str, texts: list[str], namespace: str) -> Reranking:
    """Render and tokenise. Raises ApiError."""
    if server.runtime.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: it knows token ids, but no text")
    if len(texts) > min(MAX_DOCUMENTS, server.config.max_prompts):
        most = min(MAX_DOCUMENTS, server.config.max_prompts)
        message = f"documents has {len(texts)} items; at most {most} are allowed"
        raise ApiError(400, message, param="documents")
    try:
        for text in (query, *texts):
            server.runtime.check_length(text)
        return Reranking(server.runtime.client, query, texts, namespace)
    except InvalidRequest as error:
        raise invalid(error) from None


def _result(ranked: Ranked, texts: list[str], with_texts: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"index": ranked.index, "relevance_score": ranked.relevance_score}
    return {**result, "document": {"text": texts[ranked.index]}} if with_texts else result
