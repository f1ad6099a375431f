"""`radixserve serve`: an OpenAI-compatible server.

Its flags are the fields of `ServerConfig` (`server/config.py`) and of `EngineConfig` (`config.py`).
To add a flag, add a field and its line in the docstring; `_COMMON` lists those that --help shows.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from typing import Any

from radixserve.commands.flags import (
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    add_record_flags,
    given_engine,
    given_fields,
)
from radixserve.commands.terminal import as_path
from radixserve.errors import InvalidRequest
from radixserve.server.config import ServerConfig, read_settings

_SERVER = "server."  # prefix of ServerConfig's fields in the parsed arguments
_COMMON = (  # fields whose flags --help lists; --help-all lists the others, too
    "host",
    "port",
    "served_model_name",
    "api_key_file",
    "max_queued_requests",
    "tool_call_parser",
    "reasoning_parser",
    "replicas",
    "log_requests",
)
_EPILOG = """\
--settings names a TOML file of these settings, such as `port = 8000` and `page-size = 16`; flags
come before it. The first SIGTERM or Ctrl-C lets requests in flight finish, the second ends at once.

examples:
  radixserve serve demo
  radixserve serve ./my-checkpoint --port 8000 --served-model-name my-model
  radixserve serve ./my-checkpoint --host 0.0.0.0 --api-key-file keys --log-requests
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "serve",
        "an OpenAI-compatible HTTP server",
        "Serve a model over HTTP: OpenAI's completions and chats, SGLang's /generate, the cache.",
        _EPILOG,
    )
    add_model_flag(parser)
    add_flags(parser, {"--settings FILE": "TOML file of settings; - is standard input"})
    add_record_flags(parser, "server", ServerConfig, _SERVER, _COMMON)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    ours, theirs = ({}, {}) if args.settings is None else read_settings(as_path(args.settings))
    config = ServerConfig(**{**ours, **given_fields(args, _SERVER)})
    engine = {**theirs, **given_engine(args)}
    gc.disable()  # imports leave no garbage, and collections would take a fifth of their time
    try:
        try:
            from radixserve.server.process import serve
        except ImportError as error:
            raise InvalidRequest(
                f'the server needs more packages ({error}): pip install "radixserve[serve]"'
            ) from None
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
        logging.getLogger("radixserve").setLevel(logging.INFO)
        return serve(args.model, engine, config)
    finally:
        gc.enable()
