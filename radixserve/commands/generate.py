"""`radixserve generate`: complete prompts from the command line, a file or JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from radixserve.checks import check_int
from radixserve.commands.flags import (
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flags,
    add_sampling_flags,
    given_engine,
    given_model,
    given_sampling,
)
from radixserve.commands.jsonl import (
    answer_batch,
    completion_fields,
    count_answers,
    read_batch,
)
from radixserve.commands.terminal import format_profile, format_seconds
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime
    from radixserve.completion import Completion

_EPILOG = """\
JSON lines: each line in is {"prompt": "text" or [token ids]} or {"messages": [{"role", "content"}]}
with any SamplingParams fields by name, which override the flags, and an optional "id". Each line
out, in the same order, has "text", "token_ids", "finish_reason", "usage" and "metrics", or "error"
and "line" where the line in was bad; then the exit code is 1. A run that was ended goes on with
--resume.

examples:
  radixserve generate --prompt "The json module" --temperature 0 --max-tokens 40
  radixserve generate --chat --prompt "How do I sort a list?" --stream --stats
  radixserve generate ./my-checkpoint --file prompt.txt --top-p 0.9 --seed 7
  cat prompts.jsonl | radixserve generate --jsonl - --output answers.jsonl
  radixserve generate --config tiny-llama --random-weights --random-prompt 100 --max-tokens 8
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "generate",
        "complete prompts from the command line, a file or JSON lines",
        "Complete prompts from the command line, a file or JSON lines.",
        _EPILOG,
    )
    add_model_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    add_flags(source, {"--prompt TEXT": "a prompt; give it again for more"}, action="append")
    files = {
        "--file FILE": "one prompt: the file's text; - is standard input",
        "--jsonl FILE": "many prompts as JSON lines, see below; - is standard input",
    }
    add_flags(source, files)
    tokens = {
        "--prompt-ids IDS": "a prompt as token ids, such as 5,17,3; give it again for more",
        "--random-prompt N": "a prompt of N random token ids; give it again for more",
    }
    add_flags(source, tokens, action="append")
    others = {
        "--chat": "take the prompt as a message of the user",
        "--system TEXT": "with --chat: system message before it",
        "--output FILE": "write to FILE instead of standard output, which is -",
        "--resume": "with --jsonl and --output: continue after the lines that FILE already has",
        "--json": "print a JSON line for each answer",
        "--stream": "print the text of a single prompt as it comes",
        "--stats": "print token counts and times to standard error",
        "--profile": "print where the steps' time went to standard error",
    }
    add_flags(parser, others)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    _check(args)
    sampling, settings, model = given_sampling(args), given_engine(args), given_model(args)
    SamplingParams(**sampling)  # checks them before a model is loaded
    data = b"" if args.jsonl is None else _read(args.jsonl)
    lines = read_batch(data, sampling, lambda text: _as_prompt(text, args))
    num_done = count_answers(args.output, len(lines)) if args.resume else 0
    lines = lines[num_done:]
    prompts = _prompts(args)
    with contextlib.ExitStack() as stack:
        out: TextIO = sys.stdout
        if args.output not in (None, "-"):
            out = stack.enter_context(open(args.output, "a", encoding="utf-8"))
        from radixserve.api.progress import loading_bar

        with loading_bar(str(model)):
            from radixserve.api.runtime import Runtime

            loaded = Runtime(model, **settings)
        if out is not sys.stdout and not args.resume:
            with contextlib.suppress(OSError):  # of a device, which has nothing to replace
                out.truncate(0)
        with loaded as runtime:
            params = runtime.sampling_params(**sampling)
            if args.random_prompt is not None:
                prompts = _random_prompts(args, runtime)
            if args.jsonl is not None:
                import asyncio

                done = asyncio.run(answer_batch(runtime, lines, out))
            elif args.stream:
                done = [_stream(runtime, prompts[0], params, out)]
            else:
                done = runtime.generate(prompts, params)
                _print_answers(done, args, out, has_text=runtime.tokenizer is not None)
            _hint_at_chat(done, args, runtime)
            profile = format_profile(runtime.cache_stats()) if args.profile else None
    if profile is not None:
        print(profile, file=sys.stderr)
    if args.stats and args.jsonl is not None:
        _print_sums(done)
    elif args.stats:
        _print_stats(done)
    if args.jsonl is not None and len(done) < len(lines):
        failed = len(lines) - len(done)
        print(
            f'radixserve: {failed} of {len(lines)} lines failed: each has an "error" in the output',
            file=sys.stderr,
        )
    return 1 if len(done) < len(lines) else 0


def _hint_at_chat(
    completions: Sequence[Completion], args: argparse.Namespace, runtime: Runtime
) -> None:
    """Suggest --chat if an answer is empty: a chat model often ends plain text at once."""
    tokenizer = runtime.tokenizer
    if args.chat or args.jsonl is not None or tokenizer is None or not tokenizer.has_chat_template:
        return
    if any(not completion.text.strip() for completion in completions):
        print(
            "radixserve: an answer is empty, and the model is made for chats: try --chat",
            file=sys.stderr,
        )


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidRequest for options that exclude each other."""
    if args.resume and (args.jsonl is None or args.output in (None, "-")):
        raise InvalidRequest("--resume needs --jsonl and the --output FILE of the run before")
    if args.system is not None and not args.chat:
        raise InvalidRequest("--system needs --chat")
    several = args.prompt or args.prompt_ids or args.random_prompt or [""]
    if args.stream and (args.jsonl is not None or len(several) > 1):
        raise InvalidRequest("--stream takes a single prompt")
    if args.stream and args.json:
        raise InvalidRequest("give --stream or --json, not both")
    if args.random_weights and (args.prompt is not None or args.file is not None):
        raise InvalidRequest(
            "--random-weights come without a tokenizer: give --prompt-ids, --random-prompt, or "
            "--jsonl with token ids"
        )
    if args.chat and (args.prompt_ids is not None or args.random_prompt is not None):
        raise InvalidRequest("--chat makes a prompt of text, not of token ids")


def _as_prompt(text: str, args: argparse.Namespace) -> str | list[dict[str, str]]:
    """The text as a prompt: with --chat, as the messages of a chat."""
    if not args.chat:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _prompts(args: argparse.Namespace) -> list[Any]:
    """The prompts that can be made without a model."""
    if args.prompt_ids is not None:
        return [_token_ids(text) for text in args.prompt_ids]
    if args.jsonl is not None or args.random_prompt is not None:
        return []
    return [_as_prompt(text, args) for text in _texts(args)]


def _token_ids(text: str) -> list[int]:
    """The token ids in a text: "5,17 3" is [5, 17, 3]. Raises InvalidRequest."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(f"--prompt-ids takes token ids such as 5,17,3, got {text!r}") from None


def _random_prompts(args: argparse.Namespace, runtime: Runtime) -> list[Any]:
    """Random token ids of the lengths in --random-prompt, the same for the same --engine-seed."""
    import numpy as np

    vocab_size, seed = runtime.model.vocab_size, runtime.config.seed
    lengths = [check_int("--random-prompt", length, 1) for length in args.random_prompt]
    return [
        np.random.default_rng(seed + index).integers(vocab_size, size=length).tolist()
        for index, length in enumerate(lengths)
    ]


def _texts(args: argparse.Namespace) -> list[str]:
    texts: list[str] = args.prompt or [_decoded(args.file)]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the prompt is not valid UTF-8 text") from None
    return texts


def _decoded(name: str) -> str:
    try:
        return _read(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text: {error}") from None


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    return Path(name).read_bytes()


def _stream(runtime: Runtime, prompt: Any, params: SamplingParams, out: TextIO) -> Completion:
    """Print an answer as it comes: its text, or token ids without a tokenizer."""
    completion, gap = None, ""
    for chunk in runtime.stream(prompt, params):
        text = chunk.text
        if runtime.tokenizer is None:
            text, gap = "".join(f"{gap}{token_id}" for token_id in chunk.token_ids), " "
        print(text, end="", file=out, flush=True)
        completion = chunk.completion
    print(file=out)
    assert completion is not None, "the last chunk carries the completion"
    return completion


def _print_answers(
    completions: Sequence[Completion], args: argparse.Namespace, out: TextIO, *, has_text: bool
) -> None:
    """Print answers: as JSON lines, as texts, or as token ids without a tokenizer."""
    lengths = args.random_prompt or ()
    names = args.prompt or args.prompt_ids or [f"{length} random tokens" for length in lengths]
    for index, completion in enumerate(completions):
        if args.json:
            print(json.dumps(completion_fields(completion)), file=out)
            continue
        if len(completions) > 1:
            print(f"{'' if index == 0 else chr(10)}--- {index + 1}: {names[index]}", file=out)
        print(completion.text if has_text else " ".join(map(str, completion.token_ids)), file=out)


def _print_sums(completions: Sequence[Completion]) -> None:
    """Print the sums of a batch's token counts; its output has those of each answer."""
    usages = [completion.usage for completion in completions]
    reused, computed, generated = (
        sum(getattr(usage, name) for usage in usages)
        for name in ("cached_tokens", "computed_tokens", "completion_tokens")
    )
    print(
        f"{len(completions):,} answers: prompts {reused + computed:,} = reused {reused:,} + "
        f"computed {computed:,}, output {generated:,}",
        file=sys.stderr,
    )


def _print_stats(completions: Sequence[Completion]) -> None:
    for completion in completions:
        usage, metrics = completion.usage, completion.metrics
        print(
            f"prompt {usage.prompt_tokens} = reused {usage.cached_tokens} + computed "
            f"{usage.computed_tokens}, output {usage.completion_tokens} "
            f"({completion.finish_reason}), first token {format_seconds(metrics.ttft_s)}, "
            f"total {format_seconds(metrics.total_s)}",
            file=sys.stderr,
        )
