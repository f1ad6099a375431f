"""`AnswerView`: shows an answer in the terminal while it is generated, as markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment, SegmentLines
from rich.spinner import Spinner
from rich.syntax import Syntax
from rich.text import Text

from radixserve.api.tree_view import escape

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

REFRESHES_PER_S = 8
SHOW_WAIT_S = 0.4  # before the first token
_FENCE = re.compile(r" *(?:[-*+] +|\d+[.)] +)?(`{3,}|~{3,})(.*)")


class AnswerView:
    """A context manager: `add` pieces of an answer to it.

    Blocks of markdown are printed for good once they are complete; the last one is drawn again as
    it grows, as much of it as fits on the screen. Words wrap at the terminal's edge. Before the
    first piece it shows how much of the prompt has been computed.
    """

    def __init__(self, console: Console, progress: Callable[[], str]) -> None:
        """`progress`: returns the state of the prefill; called until the first token."""
        self._console, self._progress = console, progress
        self._began_at = time.monotonic()
        self._spinner = Spinner("dots", style="dim")
        self._text = ""  # of the block that is not complete yet
        self._has_text = self._has_printed = False
        self._live = Live(
            console=console,
            get_renderable=self._current,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()  # erases the last block
        self._print(self._text)

    def add(self, text: str) -> None:
        """Append a piece of the answer, whatever control characters it has."""
        if text:
            self._has_text = True
            blocks, self._text = split_blocks(self._text + escape_lines(text))
            if blocks:
                self._live.refresh()  # else the block would be seen twice until the next drawing
            for block in blocks:
                self._print(block)

    def _print(self, block: str) -> None:
        if not block.strip():
            return
        if self._has_printed:
            self._console.print()
        self._has_printed = True
        self._console.print(AnswerMarkdown(block))

    def _current(self) -> RenderableType:
        """What stands below the printed blocks now; called by the thread that draws."""
        if not self._has_text:
            seconds = time.monotonic() - self._began_at
            if seconds < SHOW_WAIT_S:
                return Text("")
            self._spinner.update(text=Text(f"{self._progress()}, {seconds:.0f} s", style="dim"))
            return self._spinner
        lines = self._console.render_lines(AnswerMarkdown(self._text), pad=False)
        if self._has_printed or not lines:  # never less than a line, which is what Live counts on
            lines.insert(0, [Segment("")])
        return SegmentLines(lines[-max(1, self._console.height - 2) :], new_lines=True)


def escape_lines(text: str) -> str:
    """Control characters as escapes, line by line; tabs are four blanks."""
    return "\n".join(escape(line) for line in text.replace("\t", "    ").split("\n"))


def split_blocks(text: str) -> tuple[list[str], str]:
    """The complete blocks of markdown at the beginning of a growing text, and the rest.

    A block ends with a closing fence, or before a blank line that a line without indentation
    follows. Together they are the text.
    """
    blocks: list[str] = []
    begin = position = 0
    fence, is_blank_before = "", False
    while (end := text.find("\n", position)) >= 0 or position < len(text):
        is_whole = end >= 0
        line = text[position : end if is_whole else len(text)]
        is_blank = not line.strip()
        if is_blank_before and not fence and not is_blank and not line.startswith(" "):
            blocks.append(text[begin:position])
            begin = position
        if not is_whole:
            break
        closes = bool(fence) and line.strip().startswith(fence) and not line.strip().strip(fence[0])
        if closes:
            fence = ""
        elif not fence and (match := _FENCE.fullmatch(line)) and "`" not in match[2]:
            fence = match[1]
        position = end + 1
        if closes and not line.startswith(" "):
            blocks.append(text[begin:position])
            begin = position
        is_blank_before = is_blank and not fence
    return blocks, text[begin:]


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[Any] = {}


class _Code(CodeBlock):
    """Code without its own blank lines around it: blocks are separated already."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1))


class AnswerMarkdown(Markdown):
    """Markdown of a model: nothing of its text is lost, and links show where they lead.

    HTML and backslashes are text, line ends in a paragraph stay, and code is in the terminal's own
    colours.
    """

    elements = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str) -> None:
        from markdown_it import MarkdownIt

        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False, "breaks": True})
        parser.enable(["strikethrough", "table"]).disable(["escape", "reference", "entity"])
        self.markup = text
        self.parsed = parser.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
