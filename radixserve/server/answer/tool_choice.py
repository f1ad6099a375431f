"""`ChatTools`: the tools of a chat request and its tool choice, checked, for all protocols."""

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
    """A function and its place in the request.

    place        for errors: "tools[2].function"
    schema_name  the protocol's name for the schema of the arguments
    function     "name", and optionally "description" and "parameters"
    """

    place: str
    schema_name: str
    function: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a chat request.

    functions  each {"name", "description", "parameters"}; empty: no tools
    choice     "none", "auto", "required", or "named": the function `name` must be called
    parallel   whether an answer may contain more than one call
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
        """Check tools and tool choice. `choice` None: "auto". `name_place`: the place of `name` in
        the request. Raises ApiError and InvalidRequest, which name the wrong place."""
        known: dict[str, dict[str, Any]] = {}
        for place, schema_name, function in functions:
            checked = check_function(function, place, schema_name=schema_name)
            if checked["name"] in known:
                raise wrong_field(f"{place}.name", f"{checked['name']!r} is given twice")
            known[checked["name"]] = checked
        if not known:
            if choice not in (None, "none", "auto"):
                raise wrong_field("tool_choice", "needs tools")
            return cls()
        if choice == "named" and name not in known:
            raise wrong_field(
                name_place, f"is not one of the tools: {shown(name)} ({', '.join(known)})"
            )
        return cls(tuple(known.values()), choice or "auto", name, parallel is not False)

    @property
    def may_call(self) -> bool:
        """Whether calls are parsed out of the answer."""
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether a grammar enforces a call."""
        return self.choice in ("required", "named")

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools to render; None without any. The choice "none" renders them, too, so that the
        prompt does not change and stays cached."""
        tools = [{"type": "function", "function": function} for function in self.functions]
        return tools or None


def functions_of(tools: Sequence[FunctionTool | OtherTool] | None) -> list[PlacedFunction]:
    """The functions among the tools of a chat completion."""
    return [
        PlacedFunction(
            f"tools[{index}].function",
            "parameters",
            tool.function.model_dump(by_alias=True, exclude_none=True),
        )
        for index, tool in enumerate(tools or ())
        if isinstance(tool, FunctionTool)
    ]
