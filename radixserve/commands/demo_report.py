"""What `radixserve demo` prints, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from radixserve._version import __version__
from radixserve.api.tree_view import Decode, draw_tree, escape
from radixserve.commands.demo_run import Answer, Listener, Performance, count_same, totals
from radixserve.commands.demo_text import CONVERSATIONS, SYSTEM_PROMPT
from radixserve.commands.terminal import format_seconds, make_console

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime

_STYLES = {"HIT": "bold green", "PARTIAL": "bold yellow", "MISS": "bold red"}


class TextReport(Listener):
    """Prints a line a request, then the comparison, then the tree."""

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
        self._console.print()
        self._console.print(title, style="bold")
        self._line("        reused + computed = prompt   first token  question → answer", "dim")

    def answer(self, answer: Answer) -> None:
        usage, metrics = answer.completion.usage, answer.completion.metrics
        row = Text()
        row.append(f"{answer.verdict:<7}", _STYLES[answer.verdict])
        row.append(
            f"{usage.cached_tokens:>7} +{usage.computed_tokens:>9} ={usage.prompt_tokens:>7}"
            f"{format_seconds(metrics.ttft_s):>14}  "
        )
        row.append(answer.question, "cyan")
        row.append(f" → {escape(answer.completion.text.strip())}")
        self._line(row)

    def compare(self, cached: Performance, plain: Performance) -> None:
        """The same work with the cache on and off."""
        self._console.print()
        self._console.print("The same work with the cache off", style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        table.add_row("", "cache on", "cache off", "factor", style="dim")
        sequential, at_once = slice(0, -1), slice(-1, None)
        for title, which in (("one after another", sequential), ("all at once", at_once)):
            self._add_rows(table, title, cached, plain, which)
        self._console.print(table)
        on = totals(cached.parts)
        self._say(
            f"hit rate {100 * on.cached_tokens / on.prompt_tokens:.1f} %: "
            f"{on.cached_tokens:,} of {on.prompt_tokens:,} prompt tokens were reused"
        )
        same, count = count_same(cached, plain), len(cached.answers)
        verdict = "yes" if same == count else "no"
        self._say(f"same answers with and without the cache: {verdict} ({same} of {count})")

    def draw(self, dump: dict[str, Any], decode: Decode | None) -> None:
        """The tree as it was after the second turns."""
        self._console.print()
        self._console.print("The tree after the second turns", style="bold")
        self._say(
            "Drawn while two of the second turns run once more. A node: its tokens, the positions "
            "that they cover, the references that lock it, the running requests that hold it, "
            "and its text."
        )
        self._console.print(draw_tree(dump, decode, width=self._console.width))

    def _add_rows(
        self, table: Table, title: str, cached: Performance, plain: Performance, which: slice
    ) -> None:
        on, off = totals(cached.parts[which]), totals(plain.parts[which])
        count = sum(len(part.answers) for part in cached.parts[which])
        table.add_row(Text(f"{title}, {count} requests", "cyan"))
        table.add_row(
            "  prompt tokens computed",
            f"{on.computed_tokens:,}",
            f"{off.computed_tokens:,}",
            f"{off.computed_tokens / on.computed_tokens:.1f} x",
        )
        for label, mine, other in (
            ("mean time to first token", on.mean_ttft_s, off.mean_ttft_s),
            ("total time", on.seconds, off.seconds),
        ):
            factor = f"{other / mine:.1f} x"
            table.add_row(f"  {label}", format_seconds(mine), format_seconds(other), factor)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _line(self, text: str | Text, style: str | None = None) -> None:
        self._console.print(text, style=style, no_wrap=True, overflow="ellipsis", crop=True)
