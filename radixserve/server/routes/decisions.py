"""POST /v1/decisions: questions about one input, in OpenAI's format."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from radixserve.decisions import MAX_OPTIONS, Decision, Option, Question
from radixserve.errors import InvalidRequest
from radixserve.recipes.decisions import MAX_QUESTIONS, DecisionBatch
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import AppState, namespace_of, server_of
from radixserve.server.prompt.chat_messages import read_messages
from radixserve.server.prompt.chat_prompt import check_size
from radixserve.server.prompt.prompt_input import in_thread_if
from radixserve.server.routes.responses.schema import (
    CallItem,
    MessageItem,
    OutputItem,
    ResponseRefusalPart,
    ResponseTextPart,
    item_kind,
    text_or_items,
)
from radixserve.server.routes.responses.translate import check_calls, messages_of
from radixserve.server.turn.decision_run import run_decisions
from radixserve.server.wire.body import (
    MAX_ITEMS,
    Body,
    Members,
    Short,
    TextOrList,
    by_type,
)
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.fields import rules_of
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import CacheFields

router = APIRouter(route_class=JsonRoute)
_AT_ONCE = 256  # engine requests of one call that are submitted at a time
_MANY_QUESTIONS = 16  # more are tokenised in another thread


class JsonPart(Body):
    """An object or a list of objects, which the model reads as JSON."""

    type: Literal["input_json"]
    data: Annotated[Any, WithJsonSchema({"type": ["object", "array"]})]


Part = Annotated[
    Annotated[ResponseTextPart, Tag("<input_text>")] | Annotated[JsonPart, Tag("<input_json>")],
    Discriminator(by_type),
]
Instructions = TextOrList[Part]


class Choice(Body):
    value: StrictBool | StrictStr
    description: str | None = None


class Level(Body):
    label: str
    description: str | None = None


class PredicateQuestion(Body):
    type: Literal["predicate"]
    instructions: Instructions
    name: Short | None = None


class ChoiceQuestion(Body):
    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_OPTIONS)]
    name: Short | None = None


class ScoreQuestion(Body):
    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_OPTIONS)]
    name: Short | None = None


AskedQuestion = Annotated[
    Annotated[PredicateQuestion, Tag("<predicate>")]
    | Annotated[ChoiceQuestion, Tag("<choice>")]
    | Annotated[ScoreQuestion, Tag("<score>")],
    Discriminator(by_type),
]


class InputMessage(Body):
    """A message of the input."""

    skips_unknown: ClassVar[bool] = True

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrList[
        Annotated[
            Annotated[ResponseTextPart, Tag("<input_text>")]
            | Annotated[ResponseTextPart, Tag("<output_text>")]
            | Annotated[ResponseRefusalPart, Tag("<refusal>")]
            | Annotated[JsonPart, Tag("<input_json>")],
            Discriminator(by_type),
        ]
    ]

    def as_item(self) -> MessageItem:
        """The message as an item of a response's input, with its parts joined to one text."""
        text = self.content
        if not isinstance(text, str):
            separator = "" if self.role == "assistant" else "\n"
            text = separator.join(map(_text_of, text))
        return MessageItem(role=self.role, content=text)


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")],
    Discriminator(item_kind),
]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class DecisionsRequest(CacheFields):
    rules: ClassVar = rules_of("decisions")

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Items, Tag("<list>")],
        Discriminator(text_or_items),
    ]
    questions: Annotated[list[AskedQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    model: Short | None = None
    chat_template_kwargs: Members | None = None


@router.post("/v1/decisions")
async def decide(request: Request, body: DecisionsRequest) -> Response:
    """The probability of each possible answer, for 1 to 400 questions about one input.

    The input is computed once for all questions. Nothing is generated.
    """
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    namespace = namespace_of(request, body)
    is_large = has_large_body(request) or len(body.questions) > _MANY_QUESTIONS
    batch = await in_thread_if(is_large, partial(_batch, server, body, namespace))
    num_answers = len(body.questions)
    decisions, usage, _ = await run_decisions(request, batch, _AT_ONCE, num_answers)
    return answer(
        {
            "model": server.name_of(namespace),
            "answers": [_answer(decision) for decision in decisions],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "computed_tokens": usage.computed_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": num_answers,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + num_answers,
            },
        }
    )


def _batch(server: AppState, body: DecisionsRequest, namespace: str) -> DecisionBatch:
    """Render and tokenise the input and the questions. Raises ApiError."""
    given = _input(body)
    questions = [_question(index, asked) for index, asked in enumerate(body.questions)]
    if server.runtime.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: it knows token ids, but no text")
    if not isinstance(given, str):
        check_size(server, given)
    texts = [given] if isinstance(given, str) else []
    try:
        for text in (*texts, *(question.prompt() for question in questions)):
            server.runtime.check_length(text)
        return DecisionBatch(
            server.runtime.client, given, questions, namespace, body.chat_template_kwargs
        )
    except InvalidRequest as error:
        raise invalid(error, param=error.param or "input") from None


def _input(body: DecisionsRequest) -> str | list[dict[str, Any]]:
    """The input as a text or as chat messages. Raises ApiError."""
    if isinstance(body.input, str):
        return body.input
    items = [item.as_item() if isinstance(item, InputMessage) else item for item in body.input]
    messages = messages_of(items)
    check_calls((), items)
    return read_messages(messages, no_pictures="decisions take text only")


def _text_of(part: ResponseTextPart | ResponseRefusalPart | JsonPart) -> str:
    if isinstance(part, ResponseTextPart):
        return part.text
    if isinstance(part, ResponseRefusalPart):
        return part.refusal
    return json.dumps(part.data, ensure_ascii=False)


def _question(index: int, asked: Any) -> Question:
    """A question of the body; `index`: its place there. Raises ApiError."""
    instructions = asked.instructions
    if not isinstance(instructions, str):
        instructions = "\n".join(map(_text_of, instructions))
    choices = levels = None
    if isinstance(asked, ChoiceQuestion):
        choices = [Option(choice.value, choice.description) for choice in asked.choices]
    if isinstance(asked, ScoreQuestion):
        levels = [Option(level.label, level.description) for level in asked.levels]
    try:
        return Question(instructions, choices, levels, asked.name)
    except InvalidRequest as error:
        place = f"questions[{index}]"
        raise ApiError(400, f"{place}: {error}", param=place) from None


def _answer(decision: Decision) -> dict[str, Any]:
    """A decision in OpenAI's format."""
    kind = decision.question.kind
    head = {"type": kind, "name": decision.name}
    pairs = list(zip(decision.values, decision.probabilities, strict=True))
    if kind == "predicate":
        return {**head, "probability": decision.probabilities[0]}
    if kind == "choice":
        probabilities = [{"value": value, "probability": share} for value, share in pairs]
        chosen = {"choice": decision.choice, "confidence": decision.confidence}
        return {**head, **chosen, "probabilities": probabilities}
    levels = [
        {"label": label, "value": index, "probability": share}
        for index, (label, share) in enumerate(pairs)
    ]
    score = {"score": decision.score, "confidence": decision.confidence}
    return {**head, **score, "probabilities": levels}
