"""`radixserve demo`: shows the effect of the prefix cache with the bundled model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__
from radixserve.api.tree_view import Decode, describe_tree, draw_tree, escape
from radixserve.commands.flags import (
    EXPORTS,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flag,
    add_sampling_flags,
    given_engine,
    given_sampling,
)
from radixserve.commands.terminal import format_seconds, make_console
from radixserve.errors import InvalidRequest
from radixserve.recipes.demo import (
    CONVERSATIONS,
    SYSTEM_PROMPT,
    DemoAnswer,
    DemoRun,
    Part,
    count_same,
    count_same_bits,
    run_demo,
    totals,
)
from radixserve.reports import TreeDump
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from radixserve.api.runtime import Runtime

_DEFAULTS = {"max_tokens": 24, "temperature": 0.0, "seed": 0}
_STYLES = {"HIT": "bold green", "PARTIAL": "bold yellow", "MISS": "bold red"}
_EXAMPLES = """\
examples:
  radixserve demo
  radixserve demo --page-size 16 --max-tokens 40
  radixserve demo --model Qwen/Qwen3-0.6B --dtype bfloat16
  radixserve demo --json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "demo",
        "see the prefix cache at work, offline, with the model that ships with radixserve",
        "Ask questions that share one long system prompt, with the prefix cache on and off.\n"
        "Show what was reused, what that saved, and the tree.",
        _EXAMPLES,
    )
    add_model_flag(parser)
    most = "most nodes of the tree to draw (default: 40)"
    add_flags(parser, {"--max-nodes N": most}, default=40)
    add_flags(parser, {"--json": "print one JSON document instead"})
    add_sampling_flags(parser, only=list(_DEFAULTS), defaults=_DEFAULTS)
    add_engine_flags(parser, without=("cache", "seed", *EXPORTS), common=("dtype", "page_size"))
    return parser


def run(args: argparse.Namespace) -> int:
    if args.max_nodes < 1:
        raise InvalidRequest(f"--max-nodes must be >= 1, got {args.max_nodes}")
    settings, params = given_engine(args), SamplingParams(**given_sampling(args))
    from radixserve.api.progress import loading_bar

    with loading_bar(args.model):
        from radixserve.api.runtime import Runtime

        loaded = Runtime(args.model, cache="radix", **settings)
    report = None if args.json else _Report()
    with loaded as runtime:
        if report is None:
            cached = run_demo(runtime, params, args.max_nodes)
        else:
            report.introduce(args.model, runtime)
            cached = run_demo(
                runtime, params, args.max_nodes, on_part=report.begin, on_answer=report.answer
            )
        tokenizer = runtime.tokenizer
    with Runtime(args.model, cache="off", **settings) as runtime:
        uncached = run_demo(runtime, params, args.max_nodes)
        facts = {
            "model": args.model,
            "page_size": runtime.config.page_size,
            "architecture": runtime.model.architecture,
            **asdict(params),
        }
    # The text of an edge as the model reads it, role markers included.
    decode = None if tokenizer is None else partial(tokenizer.decode, keep_special=True)
    if report is None:
        print(json.dumps(_document(facts, cached, uncached, decode), indent=2))
    else:
        report.compare(cached, uncached)
        report.draw(cached.tree, decode)
    return _check_counts([*cached.answers, *uncached.answers])


def _check_counts(answers: list[DemoAnswer]) -> int:
    """The exit code: 0 if reused + computed tokens are the prompt's tokens for each answer; else 1,
    after the wrong answers were printed."""
    wrong = [answer for answer in answers if not answer.adds_up]
    for answer in wrong:
        print(
            f"radixserve: error: the counts of {answer.question!r} do not add up: "
            f"{answer.completion.usage}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _document(
    facts: dict[str, Any], cached: DemoRun, uncached: DemoRun, decode: Decode | None
) -> dict[str, Any]:
    """The result of the demo as a JSON document."""
    on, off = totals(cached.parts), totals(uncached.parts)
    answers = [*cached.answers, *uncached.answers]
    return {
        "radixserve": __version__,
        "settings": facts,
        "cache_on": {"parts": [_part(part) for part in cached.parts], **asdict(on)},
        "cache_off": {"parts": [_part(part) for part in uncached.parts], **asdict(off)},
        "hit_rate": on.cached_tokens / on.prompt_tokens,
        "computed_factor": off.computed_tokens / on.computed_tokens,
        "ttft_factor": off.mean_ttft_s / on.mean_ttft_s,
        "time_factor": off.seconds / on.seconds,
        "same_answers": count_same(cached, uncached) == len(cached.answers),
        "same_bits": count_same_bits(cached, uncached) == len(cached.answers),
        "adds_up": all(answer.adds_up for answer in answers),
        "tree": describe_tree(cached.tree, decode),
    }


def _part(part: Part) -> dict[str, Any]:
    requests = [
        {
            "question": answer.question,
            "verdict": answer.verdict,
            **asdict(answer.completion.usage),
            **asdict(answer.completion.metrics),
            "finish_reason": answer.completion.finish_reason,
            "text": answer.completion.text,
        }
        for answer in part.answers
    ]
    return {"title": part.title, **asdict(totals([part])), "requests": requests}


class _Report:
    """Prints a line for each request as it ends, then the comparison, then the tree."""

    def __init__(self) -> None:
        self._console = make_console()

    def introduce(self, name: str, runtime: Runtime) -> None:
        model, memory = runtime.model, runtime.memory
        dtype = str(model.dtype).removeprefix("torch.")
        self._say(
            f"radixserve {__version__}, model {name}: {model.architecture}, "
            f"{model.num_parameters / 1e6:,.1f} M parameters, {dtype}\n"
            f"Room for {memory.pool_tokens:,} tokens in the cache, page size "
            f"{runtime.config.page_size}."
        )
        if runtime.tokenizer is not None:
            shared = len(runtime.tokenizer.encode(SYSTEM_PROMPT))
            self._say(
                f"{len(CONVERSATIONS)} conversations share a system prompt of {shared} tokens.\n"
                "HIT: at least half of the prompt was reused; PARTIAL: less; MISS: nothing."
            )

    def begin(self, title: str) -> None:
        self._title(title)
        self._line("        reused + computed = prompt   first token  question → answer", "dim")

    def answer(self, answer: DemoAnswer) -> None:
        from rich.text import Text

        usage, metrics = answer.completion.usage, answer.completion.metrics
        counts = (
            f"{usage.cached_tokens:>7} +{usage.computed_tokens:>9} ={usage.prompt_tokens:>7}"
            f"{format_seconds(metrics.ttft_s):>14}  "
        )
        verdict = (f"{answer.verdict:<7}", _STYLES[answer.verdict])
        text = f" → {escape(answer.completion.text.strip())}"
        self._line(Text.assemble(verdict, counts, (answer.question, "cyan"), text))

    def compare(self, cached: DemoRun, uncached: DemoRun) -> None:
        """Print the figures of the same requests with the cache on and off."""
        from rich.table import Table

        self._title("The same work with the cache off")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        table.add_row("", "cache on", "cache off", "factor", style="dim")
        _add_rows(table, "one after another", cached.parts[:-1], uncached.parts[:-1])
        _add_rows(table, "all at once", cached.parts[-1:], uncached.parts[-1:])
        self._console.print(table)
        on = totals(cached.parts)
        self._say(
            f"hit rate {100 * on.cached_tokens / on.prompt_tokens:.1f} %: "
            f"{on.cached_tokens:,} of {on.prompt_tokens:,} prompt tokens were reused"
        )
        count, same_bits = len(cached.answers), count_same_bits(cached, uncached)
        if same_bits == count:
            self._say(f"same bits with and without the cache: yes ({count} of {count})")
            return
        same = count_same(cached, uncached)
        verdict = "yes" if same == count else "no"
        self._say(
            f"same answers with and without the cache: {verdict} ({same} of {count}), "
            f"same bits: no ({same_bits} of {count})"
        )

    def draw(self, dump: TreeDump, decode: Decode | None) -> None:
        """Print the tree after the second turns."""
        self._title("The tree after the second turns")
        self._say(
            "Drawn while two of the second turns run once more. A node: its tokens, the positions "
            "that they cover, the references that lock it, the running requests that hold it, "
            "and its text."
        )
        self._console.print(draw_tree(dump, decode, width=self._console.width))

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(text, style="bold")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _line(self, text: str | Text, style: str | None = None) -> None:
        self._console.print(text, style=style, no_wrap=True, overflow="ellipsis", crop=True)


def _add_rows(
    table: Table, title: str, cached: tuple[Part, ...], uncached: tuple[Part, ...]
) -> None:
    """Add a title and three figures of the same requests with the cache on and off."""
    from rich.text import Text

    on, off = totals(cached), totals(uncached)
    count = sum(len(part.answers) for part in cached)
    table.add_row(Text(f"{title}, {count} requests", "cyan"))
    rows = (
        ("prompt tokens computed", on.computed_tokens, off.computed_tokens, "{:,}".format),
        ("mean time to first token", on.mean_ttft_s, off.mean_ttft_s, format_seconds),
        ("total time", on.seconds, off.seconds, format_seconds),
    )
    for label, mine, other, as_text in rows:
        table.add_row(f"  {label}", as_text(mine), as_text(other), f"{other / mine:.1f} x")
