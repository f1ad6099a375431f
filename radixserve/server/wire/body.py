"""`Body`: the base class of request bodies, and types with bounds for their fields.

It skips, maps or refuses fields that its class does not have, by the rules in `fields.py`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from radixserve.checks import suggestion
from radixserve.server.wire.fields import FieldRule, Kind

T = TypeVar("T")
MAX_ITEMS = 65_536  # of a list, unless it contains token ids
MAX_IDS = 262_144  # the largest vocabulary
MAX_STOP_TEXT = 4_096  # characters of a stop string
_SKIPPED_ANYWHERE = ("cache_control",)  # in classes that do not have the field
_MAX_MEMBERS = 256  # of an object with fields of its class
# Texts that are stored or compared: names, ids, keys.
Short = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Bounded = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]


def from_array(most: int) -> BeforeValidator:
    """A validator that converts the token ids of a large body, an array, to a list. It fails for
    more than `most`."""

    def as_list(value: Any) -> Any:
        if not isinstance(value, array):
            return value
        if len(value) > most:
            message = "must have at most {max_length} items"
            raise PydanticCustomError("too_long", message, {"max_length": most})
        return value.tolist()

    return BeforeValidator(as_list)


Ids = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True), from_array(MAX_IDS)]
# JSON objects that are passed on unchanged: schemas, a template's variables.
Members = Annotated[dict[str, Any], Field(max_length=MAX_ITEMS)]


class Skipped(NamedTuple):
    """A field that was skipped, or a tool that was left out.

    param  its place in the body: "messages[2].annotations"
    label  its place without indexes: "messages[].annotations"
    """

    param: str
    label: str


class Body(BaseModel):
    """A request body or a part of it, with strict types. An unknown field is refused by its name,
    unless `rules` say otherwise. A validator is built when the class is first used: to build all
    of them takes a tenth of a server's start.

    rules          by name: what happens to fields that are not of this class
    skips_unknown  skip all other unknown fields, too, as in members of messages
    """

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)
    rules: ClassVar[Mapping[str, FieldRule]] = {}
    skips_unknown: ClassVar[bool] = False
    _skipped: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _sort_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Remove unknown fields that are skipped or have no effect, and validate the rest. Raises
        PydanticCustomError for the first unknown field that is refused."""
        if not isinstance(value, dict):
            return handler(value)
        if len(value) > _MAX_MEMBERS and not cls.skips_unknown:
            raise PydanticCustomError(
                "too_many_members", "must have at most {most} members", {"most": _MAX_MEMBERS}
            )
        known, skipped, names = {}, [], cls._names()
        for name, given in value.items():
            if name in names:
                known[name] = given
                continue
            rule = cls.rules.get(name)
            kind = Kind.REFUSED if rule is None else rule.kind
            if given is None:  # null has no effect
                continue
            if rule is not None and any(given == no_op for no_op in rule.no_ops):
                continue
            is_skipped = name in _SKIPPED_ANYWHERE or cls.skips_unknown
            if kind is Kind.SKIPPED or (rule is None and is_skipped):
                skipped.append(name)
                continue
            near = "" if rule is not None else suggestion(name, (*names, *cls._taken()))
            raise PydanticCustomError(
                "refused", "{name}", {"name": name, "rule": rule, "near": near}
            )
        body = handler(known)
        body._skipped = tuple(skipped)
        return body

    @classmethod
    def _taken(cls) -> list[str]:
        """The names of fields that are not of the class and are not refused."""
        return [name for name, rule in cls.rules.items() if rule.kind is not Kind.REFUSED]

    @classmethod
    def _names(cls) -> frozenset[str]:
        """The names of the class's fields in JSON."""
        names: frozenset[str] | None = cls.__dict__.get("_field_names")
        if names is None:
            fields = cls.model_fields.items()
            names = frozenset(field.alias or name for name, field in fields)
            type.__setattr__(cls, "_field_names", names)
        return names


class OtherTool(BaseModel):
    """A tool of a type that the server does not know: it is left out of the prompt."""

    model_config = ConfigDict(extra="allow")
    type: Short


def skipped_in(body: BaseModel, place: str = "") -> Iterator[Skipped]:
    """The fields and tools that were skipped in a body and its parts. O(parts). `place`: of
    `body` in the request."""
    if isinstance(body, OtherTool):
        yield Skipped(f"{place}.type", f"{place.partition('[')[0]}[{body.type}]")
        return
    if isinstance(body, Body):
        for name in body._skipped:
            param = _joined(place, name)
            yield Skipped(param, re.sub(r"\[\d+\]", "[]", param))
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            yield from skipped_in(value, _joined(place, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from skipped_in(item, f"{_joined(place, name)}[{index}]")


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


# -- discriminators of unions. Tags are written "<tag>", so that errors can leave them out --------


def by_type(value: Any) -> str | None:
    """The tag of a part: its `type`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


def by_role(value: Any) -> str | None:
    """The tag of a message: its `role`."""
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"<{role}>" if isinstance(role, str) else None


def text_or_list(value: Any) -> str | None:
    """The tag of content: "<text>", or "<list>" for a list of parts."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


TextOrList = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Bounded[T], Tag("<list>")],
    Discriminator(text_or_list),
]
