"""`TemplateEnvironment`: Jinja as transformers sets it up, on strings that know whose they are.

Templates read tainted values as they read plain ones; every operation of Jinja that makes a string
of them gives a tainted one (see tainted_str.py). Results of filters and functions that are not
followed character by character are tainted as a whole, so nothing can lose its taint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import wraps
from random import Random
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler

from radixserve.text.tainted_str import (
    CALLER,
    TaintedFloat,
    TaintedInt,
    TaintedStr,
    concatenated,
    formatted,
    placed,
    tainted,
)

# Filters that return numbers, members of their arguments, or what methods of these return.
_FILTERS_THAT_KEEP = frozenset(
    """
    abs attr batch count d default dictsort first float groupby int items last length list map max
    min reject rejectattr reverse round select selectattr slice sort sum unique wordcount
    """.split()
)
_PLAIN = (str, int, float, bool, type(None))
_PRINTED = frozenset((*_PLAIN, TaintedStr, TaintedInt, TaintedFloat))
_OF_JINJA = ("_loop_vars", "_block_vars")  # arguments that compiled templates add to calls
_STRINGS = frozenset((str, TaintedStr))
# What returns members, tainted strings, or what a template makes.
_CALLS_THAT_KEEP = frozenset(
    (dict, list, tuple, TaintedStr, Macro, LoopContext, BlockReference, Cycler)
)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text. It renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, which refuses names that begin with an underscore, so that a template
    cannot reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        names = dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The `dict` of templates, without the attributes of Python's."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _CodeGenerator(CodeGenerator):
    """Leaves it to `concat` of the environment to make strings of what a template prints."""

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("(")

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _text(value: Any) -> Any:
    """Returns what a template prints for a value: its string."""
    kind = type(value)
    if kind is TaintedStr or kind in _PRINTED or isinstance(value, jinja2.Undefined):
        return value
    return tainted(str(value), CALLER)


def _string(value: Any) -> str:
    """A string as it is, the string of another value."""
    return str(_text(value))


def _concat(values: Iterable[Any]) -> str:
    """The strings of all values as one."""
    return concatenated(
        [value if type(value) in _STRINGS else str(_text(value)) for value in values]
    )


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset("%")
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
        )
        self.binop_table["%"] = _remainder
        self.filters = {
            name: function if name in _FILTERS_THAT_KEEP else _as_a_whole(function)
            for name, function in self.filters.items()
        } | _FILTERS
        self.globals.update(raise_exception=_raise, dict=_Dict(), namespace=_Namespace)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls what a template calls. A method of a plain string, such as ", ".join, becomes that
        of a tainted one."""
        owner = getattr(__obj, "__self__", __obj)
        if type(owner) in _CALLS_THAT_KEEP:
            return super().call(__context, __obj, *args, **kwargs)
        named = [value for name, value in kwargs.items() if name not in _OF_JINJA]
        is_plain = all(type(value) in _PLAIN for value in (*args, *named))
        if type(owner) is str and not is_plain:
            __obj = getattr(concatenated((owner, _EMPTY)), __obj.__name__)
        result = super().call(__context, __obj, *args, **kwargs)
        is_own = is_plain and (callable(owner) or type(owner) is str)
        return result if is_own or type(result) is not str else tainted(result, CALLER)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandboxed `format` or `format_map` of a string; None for other values."""
        is_method = isinstance(value, MethodType | BuiltinMethodType)
        owner = getattr(value, "__self__", None)
        if not is_method or not isinstance(owner, str):
            return None
        if value.__name__ not in ("format", "format_map"):
            return None
        place = SandboxedFormatter(self).vformat
        if value.__name__ == "format":
            return lambda *args, **kwargs: placed(owner, place, args, kwargs)
        return lambda names: placed(owner, place, (), names)


def _remainder(left: Any, right: Any) -> Any:
    return formatted(left, right) if isinstance(left, str) else left % right


def _as_a_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def as_a_whole(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, str):
            return result
        given = [*args, *kwargs.values()]
        if hasattr(function, "jinja_pass_arg"):
            del given[0]
        is_own = all(type(value) in _PLAIN for value in given)
        return str.__str__(result) if is_own else tainted(result, CALLER)

    return as_a_whole


def _method(name: str) -> Callable[..., str]:
    def method(value: Any, *args: Any, **kwargs: Any) -> str:
        return getattr(_string(value), name)(*args, **kwargs)  # type: ignore[no-any-return]

    return method


def _trim(value: Any, chars: str | None = None) -> str:
    return _string(value).strip(chars)


def _title(value: Any) -> str:
    text = _string(value)
    titled = jinja2.filters.do_title(str.__str__(text))
    return text.mapped(titled) if isinstance(text, TaintedStr) else titled


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = concatenated((_string(value), _EMPTY))
    return text.replace(_string(old), _string(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, values: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return concatenated((_string(d), _EMPTY)).join(map(_string, values))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    return formatted(_string(value), kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own one would escape HTML characters."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return text if type(value) in _PLAIN else tainted(text, CALLER)


def _choice(values: Iterable[Any]) -> Any:
    """The filter `random`. It makes one choice for good: a text that differs in every turn would
    keep the conversation out of the cache."""
    return Random(0).choice(list(values))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


_EMPTY = tainted("", CALLER)
_FILTERS: dict[str, Callable[..., Any]] = {
    "trim": _trim,
    "title": _title,
    **{name: _method(name) for name in ("capitalize", "lower", "upper")},
    **dict.fromkeys(("string", "safe"), _string),  # nothing is escaped: all strings are safe
    "replace": _replace,
    "join": _join,
    "format": _format,
    "tojson": _to_json,
    "random": _choice,
}
