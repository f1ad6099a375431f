"""`radixserve pull`, `list` and `rm`: models of the Hugging Face hub in the local cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from radixserve.commands.flags import add_command
from radixserve.config import format_bytes
from radixserve.errors import InvalidRequest
from radixserve.models.names import HubName, read_hub_name

_NAME_HELP = "owner/name of a repository, or owner/name:QUANT for one of its GGUF files"
_PULL_EPILOG = """\
Without QUANT it is the repository's checkpoint in safetensors, if it has one, else its GGUF file:
the only one, or that in Q4_K_M. Every command takes the same name as MODEL. What is downloaded is
checked (sha256); after an interruption the same command goes on. Files lie in the cache of
huggingface_hub ($HF_HOME). $HF_ENDPOINT names another hub, $HF_TOKEN opens gated models.

examples:
  radixserve pull HuggingFaceTB/SmolLM2-135M-Instruct
  radixserve pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  radixserve chat Qwen/Qwen3-0.6B-GGUF:Q8_0
"""
_LIST_EPILOG = """\
examples:
  radixserve list
"""
_RM_EPILOG = """\
Without QUANT all that the cache has of the repository is deleted.

examples:
  radixserve rm Qwen/Qwen3-0.6B-GGUF:Q8_0
"""


class Command(NamedTuple):
    """A command of the command line, as `build_parser` adds it."""

    add_parser: Callable[[Any], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace], int]


def _add_pull(commands: Any) -> argparse.ArgumentParser:
    text = "Download a model from the Hugging Face hub, or what is missing of it."
    parser = add_command(commands, "pull", "download a model from the hub", text, _PULL_EPILOG)
    parser.add_argument("name", metavar="REPO[:QUANT]", help=_NAME_HELP)
    return parser


def _add_list(commands: Any) -> argparse.ArgumentParser:
    text = "List the models of the hub that are in the cache."
    return add_command(commands, "list", "list the models that were downloaded", text, _LIST_EPILOG)


def _add_rm(commands: Any) -> argparse.ArgumentParser:
    text = "Delete a model of the hub from the cache."
    parser = add_command(commands, "rm", "delete a model that was downloaded", text, _RM_EPILOG)
    parser.add_argument("name", metavar="REPO[:QUANT]", help=_NAME_HELP)
    return parser


def _pull(args: argparse.Namespace) -> int:
    from radixserve.models.hub import fetch, plan_download

    download = plan_download(_hub_name(args.name))
    num_files, missing = len(download.files), download.missing_bytes
    here = "" if missing == download.num_bytes else f", {format_bytes(missing)} are missing"
    print(
        f"{download.name}: {num_files} file{'' if num_files == 1 else 's'}, "
        f"{format_bytes(download.num_bytes)}{here}",
        flush=True,
    )
    try:
        path = fetch(download)
    except KeyboardInterrupt:
        print(f"\nradixserve: interrupted; `radixserve pull {args.name}` goes on", file=sys.stderr)
        return 130
    print(f"complete and checked: {path}\nradixserve chat {download.name}")
    return 0


def _list(_: argparse.Namespace) -> int:
    from radixserve.models.hub import cached_models

    models = cached_models()
    if not models:
        print("no model of the hub is in the cache; `radixserve pull REPO` downloads one")
    width = max((len(str(model.name)) for model in models), default=0)
    for model in models:
        state = "" if model.is_whole else "  incomplete: pull it again"
        print(f"{model.name!s:<{width}}  {format_bytes(model.num_bytes):>10}{state}")
    return 0


def _rm(args: argparse.Namespace) -> int:
    from radixserve.models.hub import remove

    name = _hub_name(args.name)
    print(f"{name}: {format_bytes(remove(name))} deleted")
    return 0


def _hub_name(text: str) -> HubName:
    name = read_hub_name(text)
    if name is None:
        raise InvalidRequest(
            f"{text!r} is not a name on the hub: give owner/name or owner/name:QUANT"
        )
    return name


PULL, LIST, RM = Command(_add_pull, _pull), Command(_add_list, _list), Command(_add_rm, _rm)
