"""`radixserve demo`: what the prefix cache does, shown with a small model that ships along."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__
from radixserve.api.tree_view import Decode, describe_tree
from radixserve.commands.demo_run import (
    Answer,
    Listener,
    Part,
    Performance,
    count_same,
    perform,
    totals,
)
from radixserve.commands.flags import (
    add_engine_flags,
    add_model_flag,
    add_sampling_flags,
    given_engine,
    given_sampling,
)
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime
    from radixserve.text.tokenizer import Tokenizer

_DEFAULTS = {"max_tokens": 24, "temperature": 0.0, "seed": 0}
_EXAMPLES = """\
examples:
  radixserve demo
  radixserve demo --page-size 16 --max-tokens 40
  radixserve demo --model Qwen/Qwen3-0.6B --dtype bfloat16
  radixserve demo --json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see the prefix cache at work, offline, with the model that ships with radixserve",
        description="Ask questions that share one long system prompt, with the prefix cache on and "
        "off.\nShow what was reused, what that saved, and the tree.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flag(parser)
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=40,
        metavar="N",
        help="most nodes of the tree to draw (default: 40)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_sampling_flags(parser, only=list(_DEFAULTS), defaults=_DEFAULTS)
    add_engine_flags(parser, without=("cache", "seed", "trace", "trace_hash_block"))
    return parser


def run(args: argparse.Namespace) -> int:
    if args.max_nodes < 1:
        raise InvalidRequest(f"--max-nodes must be >= 1, got {args.max_nodes}")
    settings, params = given_engine(args), SamplingParams(**given_sampling(args))
    from radixserve.api.runtime import Runtime
    from radixserve.commands.demo_report import TextReport

    report = Listener() if args.json else TextReport()
    with Runtime(args.model, cache="radix", **settings) as runtime:
        if isinstance(report, TextReport):
            report.introduce(args.model, runtime)
        cached = perform(runtime, params, args.max_nodes, report)
        decode = None if runtime.tokenizer is None else _with_special(runtime.tokenizer)
    with Runtime(args.model, cache="off", **settings) as runtime:
        plain = perform(runtime, params, args.max_nodes, Listener())
        facts = {"model": args.model, **_settings(runtime), **dataclasses.asdict(params)}
    if isinstance(report, TextReport):
        report.compare(cached, plain)
        report.draw(cached.tree, decode)
    else:
        print(json.dumps(document(facts, cached, plain, decode), indent=2))
    return check_counts([*cached.answers, *plain.answers])


def _with_special(tokenizer: Tokenizer) -> Decode:
    """Text of an edge as the model reads it, role markers included."""
    return lambda token_ids: tokenizer.decode(token_ids, keep_special=True)


def check_counts(answers: list[Answer]) -> int:
    """0 when reused + computed is the prompt for each answer; else 1, and what is wrong."""
    wrong = [answer for answer in answers if not answer.adds_up]
    for answer in wrong:
        print(
            f"radixserve: error: the counts of {answer.question!r} do not add up: "
            f"{answer.completion.usage}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def document(
    facts: dict[str, Any], cached: Performance, plain: Performance, decode: Decode | None
) -> dict[str, Any]:
    """Everything that the demo shows, as plain data."""
    on, off = totals(cached.parts), totals(plain.parts)
    answers = [*cached.answers, *plain.answers]
    return {
        "radixserve": __version__,
        "settings": facts,
        "cache_on": {"parts": [_part(p) for p in cached.parts], **dataclasses.asdict(on)},
        "cache_off": {"parts": [_part(p) for p in plain.parts], **dataclasses.asdict(off)},
        "hit_rate": on.cached_tokens / on.prompt_tokens,
        "computed_factor": off.computed_tokens / on.computed_tokens,
        "ttft_factor": off.mean_ttft_s / on.mean_ttft_s,
        "time_factor": off.seconds / on.seconds,
        "same_answers": count_same(cached, plain) == len(cached.answers),
        "adds_up": all(answer.adds_up for answer in answers),
        "tree": describe_tree(cached.tree, decode),
    }


def _settings(runtime: Runtime) -> dict[str, Any]:
    return {"page_size": runtime.config.page_size, "architecture": runtime.model.architecture}


def _part(part: Part) -> dict[str, Any]:
    return {
        "title": part.title,
        **dataclasses.asdict(totals([part])),
        "requests": [_answer(answer) for answer in part.answers],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    completion = answer.completion
    return {
        "question": answer.question,
        "verdict": answer.verdict,
        **dataclasses.asdict(completion.usage),
        **dataclasses.asdict(completion.metrics),
        "finish_reason": completion.finish_reason,
        "text": completion.text,
    }
