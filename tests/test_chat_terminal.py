"""`radixserve chat` in a pseudo-terminal: pastes, Ctrl-C, saved conversations, markdown."""

from __future__ import annotations

import io
import json
import os
import random
import re
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from radixserve.commands.chat_answer import AnswerMarkdown, AnswerView, split_blocks
from radixserve.commands.chat_saves import MAX_SAVED, SavedChats
from radixserve.errors import InvalidRequest
from tests.terminal import Terminal

PROMPT = r"main> ?$"
# The demo model is quick: an answer to "wait" pauses after some tokens until Ctrl-C is there.
PROGRAM = textwrap.dedent("""\
    import sys, threading
    from radixserve.api.chat import ChatSession
    from radixserve.cli import main
    stream = ChatSession.stream
    def pausing(self, message, params=None):
        for index, chunk in enumerate(stream(self, message, params)):
            yield chunk
            if message.startswith("wait") and index == 5:
                threading.Event().wait()
    ChatSession.stream = pausing
    sys.exit(main(sys.argv[1:]))
    """)
FLAGS = ("chat", "--temperature", "0", "--max-tokens", "12", "--num-pages", "4096")


def open_chat(state: Path, *flags: str) -> Terminal:
    return Terminal(["-c", PROGRAM, *FLAGS, *flags], {"XDG_STATE_HOME": str(state)}, columns=60)


def saved_files(state: Path) -> list[Path]:
    return sorted((state / "radixserve" / "chats" / "demo").iterdir())


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def first_chat(state: Path) -> list[str]:
    """What a conversation prints, step by step."""
    with open_chat(state) as terminal:
        steps = [terminal.wait_for(PROMPT)]
        terminal.paste("What does\nthis do:\n\n  json.dumps(1)")
        terminal.type("\r")
        steps.append(terminal.wait_for(PROMPT))
        terminal.type("wait for it\r")
        terminal.wait_for("wait for it\n")
        _wait_for_words(terminal)
        terminal.type("\x03")
        steps.append(terminal.wait_for(PROMPT))
        for typed in ("/load nosuch\r", "/lod\r", "half a question\x03", "/resume\r"):
            terminal.type(typed)
            steps.append(terminal.wait_for(PROMPT))
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C again leaves\nmain> ?$")
        terminal.type("\x03")
        assert terminal.exit_code() == 0
        steps.append(terminal.printed.decode())
    return steps


def _wait_for_words(terminal: Terminal) -> None:
    """Until a part of the answer is on the screen."""
    terminal.wait_for(r"\w{3}")


def test_a_paste_of_several_lines_is_one_message(first_chat: list[str], state: Path) -> None:
    assert "(4 lines as one message)" in first_chat[1]
    assert first_chat[1].count("computed") == 1
    (path,) = saved_files(state)
    (first, second) = json.loads(path.read_text())["turns"]
    assert first["messages"][0]["content"] == "What does\nthis do:\n\n  json.dumps(1)"
    assert second["messages"][0]["content"] == "wait for it"


def test_ctrl_c_keeps_half_an_answer(first_chat: list[str], state: Path) -> None:
    assert "tokens so far are kept; /undo takes them back" in first_chat[2]
    (path,) = saved_files(state)
    answer = json.loads(path.read_text())["turns"][1]["answer"]
    assert 1 <= len(answer["token_ids"]) < 12


def test_errors_are_one_sentence(first_chat: list[str]) -> None:
    assert "\nnosuch: No such file or directory\n" in first_chat[3]
    assert "there is no command /lod; did you mean /load?; /help lists" in first_chat[4]


def test_ctrl_c_at_the_prompt_leaves_the_second_time(first_chat: list[str], state: Path) -> None:
    assert "Ctrl-C again leaves" in first_chat[5]
    assert ", 2 turns: What does\\n" in first_chat[6]  # still there, and saved
    assert "`radixserve chat --resume`" in " ".join(first_chat[7].split())
    (path,) = saved_files(state)
    assert path.stat().st_mode & 0o77 == 0


@pytest.mark.usefixtures("first_chat")
def test_resumed_conversations_go_on_in_their_file(state: Path) -> None:
    with open_chat(state, "--resume") as terminal:
        assert "demo, 2 turns so far." in terminal.wait_for(PROMPT)
        terminal.type("Thanks.\r")
        terminal.wait_for(PROMPT)
        terminal.type("/resume 1\r")
        assert "that conversation is open" in terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    (path,) = saved_files(state)
    assert len(json.loads(path.read_text())["turns"]) == 3
    with open_chat(state, "--no-save") as terminal:
        assert "/resume lists \nearlier conversations." in terminal.wait_for(PROMPT)
        terminal.type("/resume 1\r")
        name = path.stem
        assert f"* {name}: turns 3" in " ".join(terminal.wait_for(f"{name}> ?$").split())
        terminal.type("/quit\r")
        assert terminal.exit_code() == 0
    assert saved_files(state) == [path]


def test_words_wrap_at_the_edge_and_statistics_are_a_line(first_chat: list[str]) -> None:
    assert "/help lists \nthem\n" in first_chat[4]
    statistics = first_chat[1].splitlines()[-2]
    assert re.search(r"reused \d+ \+ computed \d+ = \d+, first token .*…$", statistics)


# -- markdown -------------------------------------------------------------------------------------

ANSWER = """\
# Heaps

A **heap** is a tree: see [the page](https://example.org/heap) <b>now</b>
second line with \\(x\\) &amp; `code`.

1. one

2. two

   more of two

```python
def f(x):

    return x < 1
```
| a | b |
|---|---|
| 1 | 2 |

last
"""


def shown(text: str, *, width: int = 60, size: int = 7) -> str:
    """The screen after an answer that came in pieces of `size` characters."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=24, color_system=None)
    with AnswerView(console, lambda: "reading") as view:
        for begin in range(0, len(text), size):
            view.add(text[begin : begin + size])
            view._live.refresh()  # as its thread does at some time
    return _screen(out.getvalue())


def _screen(printed: str) -> str:
    """Lines of a terminal that understands "one up", "erase the line" and "\\r"."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", printed):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece == "\r":
            pass
        elif not piece.startswith("\x1b"):
            lines[row] += piece
    return "\n".join(line.rstrip() for line in lines)


def test_markdown_is_rendered_and_nothing_is_lost() -> None:
    screen = shown(ANSWER)
    for words in (
        "\nA heap is a tree: see the page (https://example.org/heap)",
        "<b>now</b>",
        "\nsecond line with \\(x\\) &amp; code.",
        "1 one",
        "2 two",
        "   more of two",
        " def f(x):\n\n     return x < 1",
        "\nlast",
    ):
        assert words in screen, words
    assert screen.startswith("Heaps")
    assert not any(mark in screen for mark in ("**", "```", "|---|"))


@pytest.mark.parametrize("width", [20, 40, 60])
def test_pieces_show_what_the_whole_shows(width: int) -> None:
    whole = shown(ANSWER, width=width, size=len(ANSWER))
    for size in (1, 3, 50):
        assert shown(ANSWER, width=width, size=size) == whole
    assert max(map(len, whole.splitlines())) <= width


def test_an_answer_longer_than_the_screen_is_shown_whole() -> None:
    text = "```\n" + "".join(f"line {number}\n" for number in range(100)) + "```\n"
    lines = shown(text).split()
    assert [word for word in lines if word.isdigit()] == [str(number) for number in range(100)]


def test_blocks_are_the_text() -> None:
    chooser = random.Random(0)
    parts = ["a", "b c", "\n", "\n\n", "```", "~~~", "- ", "  ", "1. ", "`x`", "```python\n"]
    for _ in range(300):
        text = "".join(chooser.choice(parts) for _ in range(30))
        blocks, rest = split_blocks(text)
        assert "".join(blocks) + rest == text
        grown: list[str] = []
        kept = ""
        for character in text:
            new, kept = split_blocks(kept + character)
            grown += new
        assert (grown, kept) == (blocks, rest)


def test_control_characters_of_an_answer_are_escapes() -> None:
    assert "\\x1b[2Jx \\r" in shown("\x1b[2Jx \r")
    out = io.StringIO()
    Console(file=out, force_terminal=True).print(AnswerMarkdown("[a](https://b.example)"))
    assert "\x1b]8" not in out.getvalue()


# -- the folder -----------------------------------------------------------------------------------


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedChats:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return SavedChats("../models/my model")


def test_the_oldest_conversations_go(saves: SavedChats) -> None:
    for number in range(MAX_SAVED + 5):
        path = saves.new_path()
        path.write_text(json.dumps({"turns": [{"messages": [{"content": f"q{number}"}]}]}))
        os.utime(path, ns=(number, number))
    assert len(list(saves.folder.iterdir())) == MAX_SAVED
    assert saves.listed()[0].question == f"q{MAX_SAVED + 4}"
    assert saves.numbered("2").question == f"q{MAX_SAVED + 3}"
    for text in ("0", "11", "x"):
        with pytest.raises(InvalidRequest, match="from 1 to 10"):
            saves.numbered(text)
    assert saves.folder.name == "models-my-model"


def test_other_files_are_left_out(saves: SavedChats) -> None:
    assert saves.listed() == []
    with pytest.raises(InvalidRequest, match="no conversation"):
        saves.numbered("1")
    saves.new_path().write_text("no JSON")
    assert saves.listed() == []
