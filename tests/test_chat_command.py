"""`radixserve chat` with a script for standard input, run in-process on the demo model."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from radixserve.api.runtime import DEMO
from radixserve.commands import chat
from radixserve.commands.terminal import make_console, print_escaped
from tests.test_cli import feed, run

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--num-pages", "4096"]
USAGE = re.compile(r"^reused (\d+) \+ computed (\d+) = (\d+), first token ")


def talk(
    monkeypatch: pytest.MonkeyPatch, *lines: str, flags: list[str] | None = None
) -> tuple[list[str], list[tuple[int, ...]]]:
    """The printed lines for this input, and (reused, computed, prompt) of each answer."""
    feed(monkeypatch, "".join(line + "\n" for line in lines).encode())
    code, out, err = run("chat", *GREEDY, *(flags or []))
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    shown = out.splitlines()
    found = [match for line in shown if (match := USAGE.match(line))]
    return shown, [tuple(map(int, match.groups())) for match in found]


def test_help() -> None:
    code, out, _ = run("chat", "--help")
    assert code == 0
    for words in ("/fork [NAME]", "--system TEXT", "--max-tokens", "examples:\n  radixserve chat"):
        assert words in out
    assert "  chat " in run("--help")[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "x", "--system", "y"], "own system message"),
        (["--load", "/no/such/chat"], "/no/such/chat: No such file"),
        (["--template", "/no/such/template"], "/no/such/template: No such file"),
        (["/no/such/model"], "/no/such/model"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_wrong_use(flags: list[str], words: str) -> None:
    code, _, err = run("chat", *flags)
    assert code == 2
    assert words in err


def test_the_temperature_is_that_of_the_flag_the_setting_or_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    monkeypatch.setattr(chat, "ChatTerminal", _Terminal(seen))
    for file in DEMO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for settings, flags, expected in (
        ({}, [], 1.0),
        ({"temperature": 0.6, "top_k": 7}, [], 0.6),
        ({"temperature": 0.6}, ["--temperature", "0.9"], 0.9),
        ({"temperature": 0.6}, ["--generation-config", "none"], 1.0),
        ({"temperature": 0.6}, ["--override-generation-config", '{"temperature": 0.4}'], 0.4),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        assert run("chat", str(tmp_path), *flags, "--num-pages", "256")[0] == 0
        assert seen[-1].temperature == expected
        assert seen[-1].top_k == (7 if "top_k" in settings else 0)


class _Terminal:
    """Notes the params of a conversation, and ends it."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def __call__(self, _runtime: Any, _chat: Any, params: Any, _options: Any) -> Any:
        self._seen.append(params)
        return self

    def greet(self, model: str, resumed: Any) -> None:
        pass

    def talk(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_conversation_computes_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, usage = talk(
        monkeypatch,
        "What does json.dumps do?",
        "",
        "And loads?",
        "/fork other",
        "Thanks.",
        "/switch main",
        "Thanks.",
        "/quit",
        "never read",
        flags=["--system", "Be brief."],
    )
    assert len(usage) == 4
    for reused, computed, prompt in usage:
        assert reused + computed == prompt
    before = 0
    for reused, _, prompt in usage[:3]:
        assert reused == max(0, before - 1)
        before = prompt + 12
    assert usage[3] == (usage[2][2] - 1, 1, usage[2][2])  # what the fork has computed already
    assert "other is a fork of main; you are in other now" in shown
    assert any(line.startswith("you are in main now, last said: ") for line in shown)


def test_every_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    shown, usage = talk(
        monkeypatch,
        "Hello!",
        "/fork",
        "/fork",
        "/fork main",
        "/switch nobody",
        "//help",
        "/tree",
        "/stats",
        "/undo",
        "/undo",
        "/undo",
        "/switch main",
        f"/save {path}",
        f"/load {path}",
        f"/load {path}",
        "Go on.",
        f"/load {path}x",
        "/save",
        "/bogus",
        "/stat",
        "/switch",
        "/help",
    )
    text = "\n".join(shown)
    for words in (
        "main-2 is a fork of main; you are in main-2 now",
        "main-2-2 is a fork of main-2; you are in main-2-2 now",
        "not 'main'",
        "there is no 'nobody'; there are main, main-2, main-2-2",
        "* main-2-2: turns 2, tokens ",
        "  main: turns 1, tokens ",
        ", fork of main-2",
        "page size 1",
        "'<|begin|><|user|>Hello!",
        "reused (",
        "of 4,096 pages of 1 used, 0 tokens evicted",
        "taken back: /help",
        "taken back: Hello!",
        "nothing was said yet",
        f"saved: {path}",
        "you are in my-chat now: * my-chat: turns 1",
        "you are in my-chat-2 now: * my-chat-2: turns 1",
        "No such file",
        "a file is missing: /save FILE",
        "there is no command /bogus",
        "there is no command /stat; did you mean /stats?; /help lists them",
        "a name is missing: /switch NAME; there are main, main-2, main-2-2",
        "  /switch NAME   go to another one",
    ):
        assert words in text, words
    assert len(usage) == 3
    assert json.loads(path.read_text())["turns"][0]["messages"][0]["content"] == "Hello!"


def test_going_on_with_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    shown, usage = talk(monkeypatch, "Hello!", f"/save {path}", "Thanks.")
    again, other = talk(monkeypatch, "Thanks.", flags=["--load", str(path)])
    assert again[0] == "demo, 1 turn so far. /help lists the commands, /quit leaves."
    assert again[1] in shown
    assert other[0][2] == usage[1][2]


def test_a_template_that_rewrites_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    shown, _ = talk(monkeypatch, "a", "b", "c", flags=["--template", str(template)])
    assert sum("changes earlier turns" in line for line in shown) == 1


def test_ctrl_c_stops_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def interrupted(console: Any, text: str) -> None:
        told.append(text)
        print_escaped(console, text)
        if len(told) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "print_escaped", interrupted)
    shown, usage = talk(monkeypatch, "What does json.dumps do?", "/stats", "And loads?")
    said = "".join(told[:3])
    assert f"{said} ..." in shown
    assert any(line.startswith("* main: turns 1, ") for line in shown)
    prompt = usage[0][2] - usage[0][1]  # what the second prompt took from the first turn
    (prompts,) = (line for line in shown if line.startswith("prompts: "))
    counted = re.fullmatch(
        r"prompts: (\d+) tokens, 0 reused \(0 %\), \1 computed; answers: (\d+) tokens", prompts
    )
    assert counted is not None, prompts
    assert 0 < int(counted[1]) < prompt + 8
    assert int(counted[2]) >= 3
    assert len(usage) == 1
    assert usage[0][0] >= 8


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    code, out, err = run("chat", *GREEDY)
    assert (code, err) == (0, "")
    assert out.startswith("demo. /help")


def test_what_could_steer_the_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_escaped(make_console(), "a\tb\x1b[2J[bold]c\r\nd")
    assert capsys.readouterr().out == "a    b\\x1b[2J[bold]c\\r\nd"
