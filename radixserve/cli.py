"""The console command `radixserve`: reads the command line, runs one command, reports errors.

Light to import: a command's module is imported, and its flags are made, when that command is called
or all are listed. Each command loads what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from radixserve._version import __version__
from radixserve.commands.flags import take_model
from radixserve.commands.parser import CommandParser
from radixserve.commands.terminal import error_line
from radixserve.errors import RadixServeError

EXTRAS = {  # the extra of setup.cfg that installs a package; other packages need none
    "fastapi": "serve",
    "gguf": "gguf",
    "llguidance": "grammar",
    "matplotlib": "plot",
    "msgpack": "kv-events",
    "msgspec": "kv-events",
    "prometheus_client": "serve",
    "ray": "cluster",
    "triton": "cuda",
    "uvicorn": "serve",
    "xxhash": "hash",
    "zmq": "kv-events",
}
COMMANDS = {  # in the order of --help: the module of a command, or its object in a module
    "demo": "demo",
    "chat": "chat",
    "generate": "generate",
    "serve": "serve",
    "pull": "models.PULL",
    "list": "models.LIST",
    "rm": "models.RM",
    "replay": "replay",
    "verify": "verify",
    "cache": "cache",
    "info": "info",
}
_EXAMPLES = """\
examples:
  radixserve demo
  radixserve chat Qwen/Qwen3-0.6B --system "You are brief."
  radixserve generate Qwen/Qwen3-0.6B --chat --prompt "What is a radix tree?"
  radixserve generate --jsonl prompts.jsonl --output answers.jsonl --max-tokens 64
  radixserve pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  radixserve serve demo
  radixserve replay requests.jsonl --policy lru,arc
  radixserve info
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 after success, 1 if a part failed, 2 if the command
    failed, 130 after an interrupt."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    given = sys.argv[1:] if argv is None else argv
    parser = build_parser(*(name for name in given[:1] if name in COMMANDS))
    args = parser.parse_args(given)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        take_model(args)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nradixserve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `radixserve ... | head`
        _drop_stdout()
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if args.debug or package in ("", "radixserve", "radixserve_kernels"):
            raise
        extra = EXTRAS.get(package)
        name = "radixserve" if extra is None else f'"radixserve[{extra}]"'
        print(
            f"radixserve: error: this command needs {package}, which is not installed: "
            f"pip install {name}",
            file=sys.stderr,
        )
        return 2
    except (RadixServeError, OSError) as error:
        if args.debug:
            raise
        print(f"radixserve: error: {error_line(error)}", file=sys.stderr)
        return 2


def build_parser(*names: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line, with the named commands; of all, without names."""
    parser = CommandParser(
        prog="radixserve",
        description="Serve language models around a token-exact radix prefix cache.",
        epilog=_EXAMPLES,
    )
    version = f"radixserve {__version__}"
    parser.add_argument("-V", "--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names or COMMANDS:
        command = _find_command(COMMANDS[name])
        command_parser = command.add_parser(commands)
        command_parser.set_defaults(run=command.run)
        command_parser.add_argument(
            "--debug", action="store_true", help="show the traceback of an error"
        )
    return parser


def _find_command(place: str) -> Any:
    """The module of a command, or its object in a module; both have `add_parser` and `run`."""
    module, _, name = place.partition(".")
    found = import_module(f"radixserve.commands.{module}")
    return getattr(found, name) if name else found


def _drop_stdout() -> None:
    """Keep the interpreter from failing again when it flushes standard output at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
