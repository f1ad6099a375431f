"""Command-line flags made from the fields of a settings record, so that the two cannot drift."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.sizes import SIZES
from radixserve.request import SamplingParams

DEFAULT_MODEL = "demo"
_SAMPLING, _ENGINE = "sampling.", "engine."
_FIELD = re.compile(r"(\w+) {2,}(\S.*)")


def add_model_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help='checkpoint folder, hub id, or "demo" for the small model that ships with radixserve '
        "(default: demo)",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model, or --config with --random-weights instead; read by `given_model`."""
    group = parser.add_mutually_exclusive_group()
    add_model_flag(group)
    parser.set_defaults(model=None)  # to see "--model demo" beside --config
    group.add_argument(
        "--config",
        choices=tuple(SIZES),
        help="instead of a model: the shapes of a known one, without its weights and tokenizer",
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="with --config: draw weights from --engine-seed and run them; prompts are token ids",
    )


def given_model(args: argparse.Namespace) -> str:
    """What the command line names, as Runtime takes it. Raises InvalidRequest."""
    if args.config is None:
        if args.random_weights:
            raise InvalidRequest(f"--random-weights needs --config: one of {', '.join(SIZES)}")
        return args.model or DEFAULT_MODEL
    if not args.random_weights:
        raise InvalidRequest(
            f"--config {args.config} has shapes only: add --random-weights to run it, or name a "
            "model with --model"
        )
    return f"random:{args.config}"


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    only: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """A flag for each field of SamplingParams, or for those in `only`."""
    group = parser.add_argument_group("sampling")
    for name in only or [name for name in _names(SamplingParams) if name not in ("n", "best_of")]:
        _add_flag(group, SamplingParams, name, _flag(name), _SAMPLING, defaults or {})


def add_engine_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """A flag for each field of EngineConfig; its seed is --engine-seed beside the requests' own."""
    group = parser.add_argument_group("engine")
    for name in _names(EngineConfig):
        if name not in without:
            flag = "--engine-seed" if name == "seed" else _flag(name)
            _add_flag(group, EngineConfig, name, flag, _ENGINE, {})


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line set."""
    return _given(args, _SAMPLING)


def given_engine(args: argparse.Namespace) -> dict[str, Any]:
    """The engine fields that the command line set, checked. Raises InvalidRequest."""
    settings = _given(args, _ENGINE)
    EngineConfig(**settings)  # a wrong one is told before anything heavy is loaded
    return settings


def _add_flag(
    group: argparse._ArgumentGroup,
    record: type,
    name: str,
    flag: str,
    prefix: str,
    defaults: Mapping[str, Any],
) -> None:
    default = defaults.get(name, argparse.SUPPRESS)
    shown = default
    if default is argparse.SUPPRESS:
        shown = next(f.default for f in dataclasses.fields(record) if f.name == name)
    text = _field_help(record).get(name, "").replace("%", "%%")
    if shown is not None and not isinstance(shown, bool) and shown != () and shown != "":
        text += f" (default: {shown})"
    reading = _reading(typing.get_type_hints(record)[name])
    if shown is True:  # --no-name switches it off
        reading = {"action": argparse.BooleanOptionalAction}
    if reading.get("action") == "append":
        text += "; give it again for more"
    group.add_argument(flag, dest=prefix + name, default=default, help=text, **reading)


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if hint is bool:
        return {"action": "store_true"}
    is_union = isinstance(hint, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is collections.abc.Iterable:
            (item,) = typing.get_args(kind)
            return {"action": "append", "type": item, "metavar": _METAVARS[item]}
    if int in kinds and str in kinds:
        return {"type": _int_or_text, "metavar": "SIZE"}
    kind = next(kind for kind in kinds if kind is not type(None))
    return {"type": kind, "metavar": _METAVARS[kind]}


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def _int_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _field_help(record: type) -> dict[str, str]:
    """The lines "name   meaning" of a record's docstring, with their continuation lines."""
    texts: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(record.__doc__ or "").splitlines():
        match = _FIELD.match(line)
        if match:
            name = match[1]
            texts[name] = match[2]
        elif name and line.startswith(" "):
            texts[name] += " " + line.strip()
    return {name: text.removesuffix(", or") for name, text in texts.items()}


def _names(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    pairs = vars(args).items()
    return {name.removeprefix(prefix): value for name, value in pairs if name.startswith(prefix)}
