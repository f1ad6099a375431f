"""Constraints on answers: `response_format`, `structured_outputs`, and SGLang's json_schema, regex
and ebnf."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from radixserve.cache.namespace import as_namespace
from radixserve.errors import InvalidRequest, RequestFailed
from radixserve.server.gate.state import AppState
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.schema import NativeSampling, ResponseFormat, StructuredOutputs
from radixserve.structured_outputs import StructuredOutput

# Names of StructuredOutput's fields by SGLang's names in sampling_params.
NATIVE = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


class Constraint(NamedTuple):
    """The fields of a StructuredOutput, and the name of the request's field that they are from."""

    name: str
    fields: Mapping[str, Any]

    async def compile(self, server: AppState, namespace: str) -> StructuredOutput:
        """Compile the grammar in a thread, as work of the tenant of `namespace`. Raises ApiError:
        400 for a wrong constraint, 429 if too many grammars wait, 503 if compiling failed."""
        try:
            structured_outputs = await asyncio.to_thread(StructuredOutput, **self.fields)
            if not server.runtime.has_grammar(structured_outputs):
                compile_grammar = partial(server.runtime.compile_grammar, structured_outputs)
                await server.grammar_threads.run(as_namespace(namespace).tenant, compile_grammar)
        except InvalidRequest as error:
            raise ApiError(400, f"{self.name}: {error}", param=self.name) from None
        except RequestFailed as error:
            headers = {"retry-after": "5"}
            message = f"{self.name}: {error}"
            raise ApiError(503, message, param=self.name, headers=headers) from None
        return structured_outputs


def read_constraint(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    native: NativeSampling | None = None,
) -> Constraint | None:
    """The constraint in a body; None without any. Raises ApiError if there are two."""
    constraints = []
    if response_format is not None and response_format.type != "text":
        constraints.append(_of_response_format(response_format))
    if structured_outputs is not None:
        fields = structured_outputs.model_dump(by_alias=True, exclude_none=True)
        constraints.append(Constraint("structured_outputs", fields))
    for theirs, ours in NATIVE.items():
        value = getattr(native, theirs, None)
        if value is not None:
            constraints.append(Constraint(f"sampling_params.{theirs}", {ours: value}))
    if len(constraints) > 1:
        names = " and ".join(constraint.name for constraint in constraints)
        raise ApiError(400, f"{names} exclude each other: give one", param=constraints[0].name)
    return constraints[0] if constraints else None


def json_schema(name: str, schema: Mapping[str, Any], strict: bool | None = True) -> Constraint:
    """The constraint of a JSON schema in the field `name`. `strict`: OpenAI's; null means false."""
    return Constraint(name, {"json": schema, "strict": bool(strict)})


def _of_response_format(given: ResponseFormat) -> Constraint:
    name = "response_format"
    if given.type == "json_object":
        return Constraint(name, {"json_object": True})
    if given.json_schema is None:
        name += ".json_schema"
        raise ApiError(400, f"{name} is required", param=name)
    return json_schema(name, given.json_schema.schema_, given.json_schema.strict)
