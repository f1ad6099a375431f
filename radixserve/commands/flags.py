"""Command-line flags, made from one-line descriptions or from the fields of a settings record.

A field becomes the flag with its name; its type and default are the flag's, and its line in the
record's docstring is the help.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from radixserve.checks import shown
from radixserve.commands.parser import CommandParser
from radixserve.config import CHOICES as ENGINE_CHOICES
from radixserve.config import EngineConfig, ExportSettings
from radixserve.errors import InvalidRequest
from radixserve.models.sizes import SIZES
from radixserve.request import SamplingParams
from radixserve.sampling_fields import NotGivenFloat, NotGivenInt
from radixserve.server.config import REASONING_PARSERS

DEFAULT_MODEL = "demo"
EXPORTS = tuple(field.name for field in dataclasses.fields(ExportSettings))
# Fields whose flags --help lists; --help-all lists the others too.
COMMON_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
COMMON_ENGINE = (
    "device",
    "dtype",
    "weight_dtype",
    "kv_dtype",
    "page_size",
    "num_pages",
    "kv_cache_memory",
    "max_running_requests",
    "max_seq_len",
    "cache",
)
CHOICES: dict[str, Sequence[str]] = {**ENGINE_CHOICES, "reasoning_parser": REASONING_PARSERS}
FIELD_METAVARS = {
    "tool_call_parser": "NAME",
    "device": "DEVICE",
    "otlp_traces_endpoint": "URL",
    "trace": "FILE",
    "kv_store": "FOLDER",
    "kv_store_size": "BYTES",
    "kv_events": "ADDRESSES",
    "kv_events_topic": "TOPIC",
    "max_wait_s": "SECONDS",
    "hint_seconds": "SECONDS",
    "max_hint_seconds": "SECONDS",
    "host": "ADDRESS",
    "served_model_name": "NAME",
    "api_key_file": "FILE",
    "shutdown_timeout": "SECONDS",
    "ready_timeout": "SECONDS",
    "session_lease": "SECONDS",
    "autoscaling": "SETTINGS",
    "prices": "LIST",
    "ray_address": "ADDRESS",
    "namespace": "NAME",
    "session": "NAME",
}
_SAMPLING, _ENGINE = "sampling.", "engine."  # prefixes of fields in the parsed arguments
_FLAG_NAMES = {  # where they are not the field's
    _ENGINE + "seed": "engine_seed",  # --seed is that of requests
    _ENGINE + "adapters": "lora_modules",  # vLLM's
}
_JSON_EXAMPLES = {  # by the names of fields whose flags take JSON
    "structured": '{"regex": "[0-9]+"}',
    "override_generation_config": '{"temperature": 0.2}',
}
_NOT_FLAGS = ("n", "best_of", "logits_processors", "keep_special_ids")
_FIELD = re.compile(r"(\w+) {2,}(\S.*)")
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
_TYPES: dict[str, Any] = {"N": int, "X": float, "SECONDS": float}  # by metavar; others are text


def add_command(
    commands: Any, name: str, summary: str, description: str, epilog: str
) -> CommandParser:
    """Add a command. `summary` is its line in `radixserve --help`."""
    parser: CommandParser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog
    )
    return parser


def add_flags(
    group: argparse._ActionsContainer, flags: Mapping[str, str], **options: Any
) -> list[argparse.Action]:
    """Add flags from {"--name METAVAR": help}; a flag without a METAVAR is a switch.

    The METAVAR determines the type: N is int, X and SECONDS are float, others are text. `options`
    are passed to `add_argument` for each flag.
    """
    actions = []
    for usage, text in flags.items():
        flag, _, metavar = usage.partition(" ")
        reading: dict[str, Any] = {"action": "store_true"}
        if metavar:
            reading = {"metavar": metavar, "type": _TYPES.get(metavar, str)}
        actions.append(group.add_argument(flag, help=text, **{**reading, **options}))
    return actions


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and --model MODEL, of which one may be given; `take_model` joins them."""
    text = (
        'checkpoint folder, GGUF file, hub id such as owner/name or owner/name:Q4_K_M, or "demo" '
        "for the small model that ships with radixserve (default: demo); --model MODEL is the same"
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", metavar="MODEL", help=argparse.SUPPRESS)


def take_model(args: argparse.Namespace) -> None:
    """Set `args.model` of a command with a model: to the given one, or the default; to None if
    --config replaces it. Raises InvalidRequest."""
    if not hasattr(args, "positional_model"):
        return
    given = [name for name in (args.positional_model, args.model) if name is not None]
    if len(given) > 1:
        raise InvalidRequest(f"two models are named, {given[0]} and {given[1]}: give one")
    config = getattr(args, "config", None)
    if given and config is not None:
        raise InvalidRequest(f"give the model {given[0]} or --config {config}, not both")
    args.model = given[0] if given else None if config is not None else DEFAULT_MODEL


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for a model, or for --config with --random-weights instead. `given_model` reads
    them."""
    add_model_flag(parser)
    parser.add_argument(
        "--config",
        choices=tuple(SIZES),
        metavar="NAME",
        help="instead of a model: the shapes of a known one, without its weights and tokenizer: "
        + ", ".join(SIZES),
    )
    text = "with --config: draw weights from --engine-seed and run them; prompts are token ids"
    add_flags(parser, {"--random-weights": text})


def given_model(args: argparse.Namespace) -> str:
    """The name of the model for Runtime. Raises InvalidRequest."""
    if args.config is None:
        if args.random_weights:
            raise InvalidRequest(f"--random-weights needs --config: one of {', '.join(SIZES)}")
        return args.model or DEFAULT_MODEL
    if not args.random_weights:
        raise InvalidRequest(
            f"--config {args.config} has shapes only: add --random-weights to run it, or name a "
            "model instead"
        )
    return f"random:{args.config}"


def add_sampling_flags(
    parser: CommandParser,
    only: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for each field of SamplingParams, or for those in `only`. `defaults`: values of
    flags that are not given."""
    names = only or [name for name in _names(SamplingParams) if name not in _NOT_FLAGS]
    group = parser.add_argument_group("sampling")
    flags = _add_field_flags(group, SamplingParams, _SAMPLING, names, defaults or {})
    parser.mark_rare(action for name, action in flags.items() if name not in COMMON_SAMPLING)


def add_engine_flags(
    parser: CommandParser, without: Sequence[str] = (), common: Sequence[str] = COMMON_ENGINE
) -> None:
    """Add a flag for each field of EngineConfig, except those in `without`. The flag of its seed is
    --engine-seed, since --seed is that of requests.

    Flags that are not `common` are listed by --help-all only.
    """
    names = [name for name in _names(EngineConfig) if name not in without]
    group = parser.add_argument_group("engine")
    flags = _add_field_flags(group, EngineConfig, _ENGINE, names, {})
    parser.mark_rare(action for name, action in flags.items() if name not in common)


def add_record_flags(
    parser: CommandParser, title: str, record: type, prefix: str, common: Sequence[str]
) -> None:
    """Add a flag for each field of `record`, in a group with this title; `given_fields` reads
    them. `prefix`: of the fields in the parsed arguments. Flags that are not `common` are listed by
    --help-all only."""
    group = parser.add_argument_group(title)
    flags = _add_field_flags(group, record, prefix, _names(record), {})
    parser.mark_rare(action for name, action in flags.items() if name not in common)


def given_fields(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The fields of a record that the command line set; `prefix`: see `add_record_flags`."""
    return _given(args, prefix)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line set."""
    fields = _given(args, _SAMPLING)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    return fields


def given_engine(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that the command line set, checked. Raises InvalidRequest."""
    settings = _given(args, _ENGINE)
    for name in ("tenant_weights", "adapters"):
        if name in settings:
            settings[name] = dict(settings[name])
    EngineConfig(**settings)  # checks them before a model is loaded
    return settings


def _add_field_flags(
    group: argparse._ArgumentGroup,
    record: type,
    prefix: str,
    names: Sequence[str],
    defaults: Mapping[str, Any],
) -> dict[str, argparse.Action]:
    """Add flags for fields of a record, with their types, defaults and docstring lines."""
    flags = {}
    fields = {field.name: field for field in dataclasses.fields(record)}
    hints, texts = typing.get_type_hints(record), _field_help(record)
    for name in names:
        default = defaults.get(name, argparse.SUPPRESS)
        value = defaults.get(name, fields[name].default)
        if isinstance(value, NotGivenFloat | NotGivenInt):
            value = f"the model's, else {value:g}"
        text = texts.get(name, "").replace("%", "%%")
        if value is not None and not isinstance(value, bool) and value != () and value != "":
            text += f" (default: {value})"
        reading = _reading(name, hints[name])
        if value is True:  # --no-name switches it off
            reading = {"action": argparse.BooleanOptionalAction}
        if reading.get("action") == "append":
            text += "; give it again for more"
        flag = "--" + (_FLAG_NAMES.get(prefix + name) or name).replace("_", "-")
        flags[name] = group.add_argument(
            flag, dest=prefix + name, default=default, help=text, **reading
        )
    return flags


def _reading(name: str, hint: Any) -> dict[str, Any]:
    """The options of `add_argument` for a field: by its type, with its choices, if it has some, as
    the metavar. The record itself refuses a wrong choice.
    """
    if name in _JSON_EXAMPLES:
        return {"type": partial(_json_object, example=_JSON_EXAMPLES[name]), "metavar": "JSON"}
    if name == "adapters":
        return {"action": "extend", "nargs": "+", "type": _named_path, "metavar": "NAME=FOLDER"}
    choices = CHOICES.get(name)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
    if choices is not None:
        return {"type": str, "metavar": f"{{{','.join(choices)}}}"}
    if hint is bool:
        return {"action": "store_true"}
    is_union = isinstance(hint, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    for kind in kinds:
        if typing.get_origin(kind) is collections.abc.Iterable:
            (item,) = typing.get_args(kind)
            if item is int and str in kinds:  # token ids, or text
                return {"type": str, "metavar": "TEXT"}
            return {"action": "append", "type": item, "metavar": _METAVARS[item]}
        if typing.get_origin(kind) is collections.abc.Mapping:
            if str in typing.get_args(kind):
                return {"action": "append", "type": _weight, "metavar": "NAME:X"}
            return {"action": "append", "type": _bias, "metavar": "ID:BIAS"}
    if int in kinds and str in kinds:
        return {"type": _int_or_text, "metavar": "SIZE"}
    kind = next(kind for kind in kinds if kind is not type(None))
    return {"type": kind, "metavar": FIELD_METAVARS.get(name, _METAVARS[kind])}


def _json_object(text: str, example: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise argparse.ArgumentTypeError(f"takes a JSON object such as {example}, got {shown(text)}")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    with contextlib.suppress(ValueError):
        return int(token_id), float(bias)
    raise argparse.ArgumentTypeError(f"takes ID:BIAS such as 42:-5, got {shown(text)}")


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name and path:
        return name, path
    raise argparse.ArgumentTypeError(f"takes NAME=FOLDER such as sql=./sql-lora, got {shown(text)}")


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition(":")
    with contextlib.suppress(ValueError):
        return name, float(weight)
    raise argparse.ArgumentTypeError(f"takes NAME:X such as alice:2, got {shown(text)}")


def _int_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _field_help(record: type) -> dict[str, str]:
    """The help of each field: its line "name   meaning" in the docstring of the record or of one of
    its bases, with continuation lines."""
    texts: dict[str, str] = {}
    name = ""
    docs = (inspect.cleandoc(base.__doc__ or "") for base in record.__mro__)
    for line in "\n".join(docs).splitlines():
        match = _FIELD.match(line)
        if match:
            name = match[1]
            texts[name] = match[2]
        elif name and line.startswith(" "):
            texts[name] += " " + line.strip()
    return {name: text.removesuffix(", or") for name, text in texts.items()}


def _names(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    pairs = vars(args).items()
    return {name.removeprefix(prefix): value for name, value in pairs if name.startswith(prefix)}
