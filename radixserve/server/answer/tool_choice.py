"""`ChatTools`: the functions that a chat's model may call, and the function that it must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.server.wire.body import OtherTool
from radixserve.server.wire.errors import wrong_field
from radixserve.server.wire.schema import FunctionTool
from radixserve.text.tool_functions import check_function


class PlacedFunction(NamedTuple):
    """place        where the request has it, for errors: "tools[2].function"
    schema_name  what the request calls the schema of the arguments
    function     "name", and where they are given "description" and "parameters"
    """

    place: str
    schema_name: str
    function: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTools:
    """functions  {"name", "description", "parameters"} each; empty: no tools
    choice      "none", "auto", "required", or "named" with `name`
    parallel    whether an answer may call more than one
    """

    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True

    @classmethod
    def read(
        cls,
        functions: Sequence[PlacedFunction],
        choice: str | None = None,
        name: str | None = None,
        *,
        parallel: bool | None = None,
        name_place: str = "tool_choice.function.name",
    ) -> ChatTools:
        """`choice` is as above, None for auto; `name_place`: where the request has `name`.

        Raises ApiError and InvalidRequest, which name the place.
        """
        known: dict[str, dict[str, Any]] = {}
        for place, schema_name, function in functions:
            checked = check_function(function, place, schema_name=schema_name)
            if checked["name"] in known:
                raise wrong_field(f"{place}.name", f"{checked['name']!r} is there twice")
            known[checked["name"]] = checked
        if not known:
            if choice not in (None, "none", "auto"):
                raise wrong_field("tool_choice", "needs tools")
            return cls()
        if choice == "named" and name not in known:
            raise wrong_field(
                name_place, f"is none of the tools: {shown(name)} ({', '.join(known)})"
            )
        return cls(tuple(known.values()), choice or "auto", name, parallel is not False)

    @property
    def may_call(self) -> bool:
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools to render, also with choice "none": the prompt stays the same, and cached."""
        tools = [{"type": "function", "function": function} for function in self.functions]
        return tools or None


def functions_of(tools: Sequence[FunctionTool | OtherTool] | None) -> list[PlacedFunction]:
    """The functions among the tools of a chat in OpenAI's older format."""
    return [
        PlacedFunction(
            f"tools[{index}].function",
            "parameters",
            tool.function.model_dump(by_alias=True, exclude_none=True),
        )
        for index, tool in enumerate(tools or ())
        if isinstance(tool, FunctionTool)
    ]
