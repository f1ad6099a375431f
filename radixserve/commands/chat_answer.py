"""`AnswerView`: shows an answer as markdown in the terminal while it is generated."""

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
SHOW_WAIT_S = 0.4  # a wait for the first token that is longer is shown
_FENCE = re.compile(r" *(?:[-*+] +|\d+[.)] +)?(`{3,}|~{3,})(.*)")


class AnswerView:
    """A context manager to which pieces of an answer are added (`add`).

    A block of markdown is printed when it is complete. The last block is redrawn while it grows, as
    much of it as fits on the screen. Before the first piece, the progress of the prefill is shown.
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
        """Append a piece of the answer. Control characters are shown as escapes."""
        if text:
            self._has_text = True
            blocks, self._text = split_blocks(self._text + escape_lines(text))
            if blocks:
                self._live.refresh()  # otherwise the block would be shown twice for a moment
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
        """What to draw below the printed blocks; called by the drawing thread."""
        if not self._has_text:
            seconds = time.monotonic() - self._began_at
            if seconds < SHOW_WAIT_S:
                return Text("")
            self._spinner.update(text=Text(f"{self._progress()}, {seconds:.0f} s", style="dim"))
            return self._spinner
        lines = self._console.render_lines(AnswerMarkdown(self._text), pad=False)
        if self._has_printed or not lines:  # Live needs at least one line
            lines.insert(0, [Segment("")])
        return SegmentLines(lines[-max(1, self._console.height - 2) :], new_lines=True)


def escape_lines(text: str) -> str:
    """The text with control characters, except line ends, as escapes, and tabs as four blanks."""
    return "\n".join(escape(line) for line in text.replace("\t", "    ").split("\n"))


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split a growing text into the complete blocks of markdown at its beginning, and the rest.

    A block ends with a closing fence, or at a blank line that is followed by a line without
    indentation. Blocks and rest together are the text.
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
    """A block of code without blank lines around it, since `AnswerView` separates blocks."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1))


class AnswerMarkdown(Markdown):
    """Markdown that a model wrote. Its text is kept complete, and links show their targets.

    HTML and backslashes are text, line ends in a paragraph are kept, and code has the terminal's
    own colours.
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
