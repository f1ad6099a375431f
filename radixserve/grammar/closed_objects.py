"""Closes the objects of a JSON schema: where it says nothing else, an object has named keys only.

An object is closed if its schema has `properties` or `patternProperties`, but neither
`additionalProperties` nor `unevaluatedProperties`. It then takes those keys, and the keys that
`required` names. An object without any of these keywords, such as `{"type": "object"}`, stays open.

A value may have to match several schemas: an object's own keywords, the branches of its `allOf`, a
branch of its `anyOf` or `oneOf`, and what `$ref` refers to. Each of these is closed to the keys of
all of them, or stays open if one of them says that it is open. So a value that matches its schema
with closed objects also matches the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from radixserve.errors import InvalidRequest

_MOST_ADDED = 65_536  # keys that are added to the schemas of a document
_MOST_COMBINED = 1_000_000  # keys of all schemas, with those that they are combined with
_LISTS = ("prefixItems", "items")  # keywords with a list of schemas, each of a value
_SCHEMAS = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_CHOICES = ("anyOf", "oneOf")
_OPENING = ("additionalProperties", "unevaluatedProperties")


class _Keys(NamedTuple):
    """The keys of an object that its schema names."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    is_open: bool = False  # it says that others are allowed, or what it refers to is not known
    has_choices: bool = False  # some of the keys belong to a branch of `anyOf` or `oneOf`

    @classmethod
    def union(cls, first: _Keys, *others: _Keys) -> _Keys:
        """All keys; `first` itself if the others add none."""
        more = [keys for keys in others if not keys.is_within(first)]
        if not more:
            return first
        return cls(
            first.names.union(*(keys.names for keys in more)),
            first.patterns.union(*(keys.patterns for keys in more)),
            first.required.union(*(keys.required for keys in more)),
            first.is_open or any(keys.is_open for keys in more),
            first.has_choices or any(keys.has_choices for keys in more),
        )

    def is_within(self, other: _Keys) -> bool:
        return (
            self.names <= other.names
            and self.patterns <= other.patterns
            and self.required <= other.required
            and self.is_open <= other.is_open
            and self.has_choices <= other.has_choices
        )

    def adds_to(self, other: _Keys) -> bool:
        """Whether these keys allow more than the keys of `other`."""
        return (self.is_open and not other.is_open) or not (
            self.names <= other.names | other.required
            and self.patterns <= other.patterns
            and self.required <= other.names | other.required
        )


_NONE = _Keys()


def closed(schema: Any) -> Any:
    """Returns a copy of a schema with closed objects. Raises InvalidRequest if its objects combine
    too many keys. O(size of the result)."""
    try:
        return _Closing(schema).document()
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply") from None


class _Closing:
    """Closes the objects of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._knows_references = _takes_definitions(root) and not _has_ids(root)
        self._keys: dict[int, _Keys] = {}  # by the id of a schema of the document
        self._variants: dict[tuple[str, _Keys], str] = {}  # names of definitions
        self._waiting: list[tuple[str, Any, _Keys]] = []  # variants: name, schema, other keys
        self._num_added = self._num_combined = 0

    def document(self) -> Any:
        result = self._closed(self._root, _NONE)
        if not self._waiting:
            return result
        definitions = dict(result.get("$defs", {}))
        while self._waiting:
            name, schema, others = self._waiting.pop()
            definitions[name] = self._closed(schema, others)
        return {**result, "$defs": definitions}

    def _closed(self, schema: Any, others: _Keys) -> Any:
        """Returns the schema, closed. `others`: keys of other schemas that its value matches,
        too."""
        if not isinstance(schema, Mapping):
            return schema
        copy = {name: self._below(name, value) for name, value in schema.items()}
        self._keys_of(schema)
        choices = {name: self._keys_of_branches(schema.get(name)) for name in _CHOICES}
        base = _Keys.union(others, self._keys_outside_of_choices(schema))
        keys = _Keys.union(base, *choices.values())
        self._num_combined += len(keys.names)
        self._check_counts()
        if isinstance(schema.get("allOf"), list):
            copy["allOf"] = [self._closed(branch, keys) for branch in schema["allOf"]]
        for name, other in zip(_CHOICES, reversed(_CHOICES), strict=True):
            if isinstance(schema.get(name), list):
                beside = _Keys.union(base, choices[other])
                copy[name] = [self._closed(branch, beside) for branch in schema[name]]
        if isinstance(schema.get("$ref"), str):
            copy["$ref"] = self._reference(schema["$ref"], keys)
        return self._with_keywords(copy, keys, is_whole=others is _NONE)

    def _below(self, name: str, value: Any) -> Any:
        """Returns the value of a keyword, with all schemas in it closed that belong to other values
        than the schema's own."""
        if name in _MAPS and isinstance(value, Mapping):
            return {key: self._closed(member, _NONE) for key, member in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self._closed(item, _NONE) for item in value]
        return self._closed(value, _NONE) if name in _SCHEMAS else value

    def _with_keywords(self, copy: dict[str, Any], keys: _Keys, *, is_whole: bool) -> Any:
        """Returns the schema with the keywords that close its own object to `keys`. `is_whole`: the
        keys are all that are known of a value."""
        can_be_strict = is_whole and not keys.is_open and not keys.has_choices
        is_strict = can_be_strict and copy.get("unevaluatedProperties") is False
        if is_strict or (is_whole and copy.get("unevaluatedProperties") is True):
            del copy["unevaluatedProperties"]
        is_object = is_strict or "properties" in copy or "patternProperties" in copy
        if keys.is_open or not is_object or any(name in copy for name in _OPENING):
            return copy
        names = keys.names if is_strict else keys.names | keys.required
        least = copy.get("minProperties")
        if isinstance(least, int) and least > len(names) and not (keys.patterns or is_strict):
            return copy
        for keyword, known in (("properties", names), ("patternProperties", keys.patterns)):
            given = copy.get(keyword, {})
            if not isinstance(given, Mapping):
                return copy  # not a schema: the parser's error says so
            more = sorted(known - given.keys())
            self._num_added += len(more)
            self._check_counts()
            if more:
                copy[keyword] = {**given, **dict.fromkeys(more, True)}
        copy["additionalProperties"] = False
        return copy

    def _check_counts(self) -> None:
        if self._num_added > _MOST_ADDED or self._num_combined > _MOST_COMBINED:
            raise InvalidRequest(
                "the objects of the schema combine too many keys: give them additionalProperties"
            )

    def _reference(self, reference: str, keys: _Keys) -> str:
        """Returns the reference, or one to a variant of its schema that takes all of `keys`."""
        target = self._target(reference)
        own = self._keys_of(target)
        if not (own.names or own.patterns) or own.is_open or not keys.adds_to(own):
            return reference
        name = self._variants.get((reference, keys))
        if name is None:
            taken = self._root.get("$defs", {})
            number = len(self._variants) + 1
            name = f"with-keys-{number}"
            while name in taken:
                name += "x"
            self._variants[reference, keys] = name
            self._waiting.append((name, target, keys))
        return f"#/$defs/{name}"

    def _keys_of(self, schema: Any) -> _Keys:
        """The keys that a schema names, with its `allOf`, `anyOf`, `oneOf` and `$ref`. Those of a
        schema that refers to itself lack the keys that the reference adds."""
        pending, begun = [schema], set[int]()
        while pending:
            node = pending[-1]
            if not isinstance(node, Mapping) or id(node) in self._keys:
                pending.pop()
            elif id(node) not in begun:
                begun.add(id(node))
                pending += [part for part in self._parts(node) if id(part) not in begun]
            else:
                pending.pop()
                choices = [self._keys_of_branches(node.get(name)) for name in _CHOICES]
                known = _Keys.union(self._keys_outside_of_choices(node), *choices)
                self._keys[id(node)] = known
        return self._known(schema)

    def _known(self, schema: Any) -> _Keys:
        return self._keys.get(id(schema), _NONE)

    def _parts(self, schema: Mapping[str, Any]) -> list[Any]:
        """The schemas that `_keys_of` reads for the keys of this one."""
        branches = [schema[name] for name in ("allOf", *_CHOICES) if name in schema]
        parts = [part for several in branches if isinstance(several, list) for part in several]
        return [*parts, self._target(schema.get("$ref"))]

    def _keys_of_branches(self, branches: Any) -> _Keys:
        if not isinstance(branches, list):
            return _NONE
        keys = _Keys.union(_NONE, *map(self._known, branches))
        return keys._replace(has_choices=True)

    def _keys_outside_of_choices(self, schema: Mapping[str, Any]) -> _Keys:
        """The keys of a schema itself, its `allOf` and its `$ref`."""
        names, patterns = (schema.get(name) or () for name in _MAPS[:2])
        required = schema.get("required") or ()
        is_open = any(schema.get(name, False) is not False for name in _OPENING)
        own = _Keys(_texts(names), _texts(patterns), _texts(required), is_open)
        branches = schema.get("allOf")
        several = [self._known(branch) for branch in branches] if isinstance(branches, list) else []
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            several.append(_Keys(is_open=True) if target is None else self._known(target))
        return _Keys.union(own, *several)

    def _target(self, reference: Any) -> Any:
        """The schema that a pointer into the document refers to; None if it is not known."""
        if not isinstance(reference, str) or not self._knows_references:
            return None
        place, target = unquote(reference), self._root
        if place != "#" and not place.startswith("#/"):
            return None
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, Mapping) and step in target:
                target = target[step]
            else:
                return None
        return target


def _texts(several: Any) -> frozenset[str]:
    """The texts of a list, or the keys of an object; none of anything else."""
    if not isinstance(several, list | Mapping):
        return frozenset()
    return frozenset(text for text in several if isinstance(text, str))


def _takes_definitions(root: Any) -> bool:
    return isinstance(root, Mapping) and isinstance(root.get("$defs", {}), Mapping)


def _has_ids(root: Any) -> bool:
    """Whether a schema below the root has an `$id`, so that pointers do not begin at the root."""
    pending = [*root.values()]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("$id"), str):
                return True
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return False
