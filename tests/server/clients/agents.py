"""Unmodified coding agents against `radixserve serve`: a turn, a loop of tools, a resumed session.

    python tests/server/clients/agents.py FOLDER_WITH_PROGRAMS [claude] [codex] [opencode] [qwen]
        [continue] [cline] [aider]

Claude Code, Codex and opencode run where none is named. Each reads a file, edits it and runs a
command in a temporary folder, as the model's script has it, and goes on with the session in a
process of its own. From the second request of a session on all but what is new and the end of one
answer comes from the cache. All this is done without drafts and with them: each request and each
answer is the same, but for ids and times, and the steps are fewer. No other address than the
server's on loopback is named to them, and what they report home is switched off.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.images.vision_checkpoints import as_file, picture  # noqa: E402
from tests.server.clients.agent_model import make_agent, tool_call  # noqa: E402
from tests.server.clients.recorder import Exchange, Recorder  # noqa: E402

ASK, MORE, LAST = "What does note.txt say? Make it green.", "And now?", "The note says green now."
MODEL = "agent-model"
PICTURE = "picture.png"
TITLE = '{"title": "A short title"}'
WITHOUT_TOOLS = {"aider": "I change the note.\n\nnote.txt\n```\nThe sky is green.\n```\n"}
_CONFIG = """\
model = "{model}"
model_provider = "local"
model_context_window = 200000
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Served(NamedTuple):
    """A server's address, and its log, which has a line of JSON a request."""

    url: str
    log: Path

    def usages(self) -> list[dict[str, Any]]:
        """Of each answer so far."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        requests = [json.loads(line) for line in lines if line.startswith("{")]
        return [request for request in requests if "prompt_tokens" in request]

    def num_encoded(self) -> int:
        """Of the pictures."""
        with urllib.request.urlopen(f"{self.url}/v1/cache/stats") as response:
            stats = json.load(response)
        return int(stats["pictures"]["encoded"]) if "pictures" in stats else 0

    def num_steps(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith("radixserve:steps_total")]
        return round(float(value))


@contextlib.contextmanager
def served(model: Path, log: Path, num_drafts: int) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "radixserve", "serve", str(model), f"--port={port}",
             f"--served-model-name={MODEL}", "--num-pages=200000", "--log-requests",
             f"--max-draft-tokens={num_drafts}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])}, stderr=output,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1_200):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready"):
                break
            time.sleep(0.1)
        yield Served(url, log)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def claude_script(note: Path) -> list[str]:
    # Claude Code adds defaults to a call's arguments, and puts them first: another call's text
    # would not be what the model said.
    edit: dict[str, Any] = {"replace_all": False, "file_path": str(note)}
    edit |= {"old_string": "blue", "new_string": "green"}
    return [
        "Let me read it. " + tool_call("Read", file_path=str(note)),
        "Now I edit it. " + tool_call("Edit", **edit),
        "And I look. " + tool_call("Bash", command=f"cat {note}", description="Show the note"),
        "Is it in the picture? " + tool_call("Read", file_path=str(note.with_name(PICTURE))),
        LAST,
    ]


def run_claude(binaries: Path, home: Path, folder: Path, url: str) -> None:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [str(binaries / "claude"), "--output-format", "json",
               "--tools", "Read,Edit,Bash", "--allowedTools", "Read Edit Bash"]  # fmt: skip
    first = json.loads(_run([*command, "-p", ASK], home, folder, environment))
    assert (first["result"], first["num_turns"], first["is_error"]) == (LAST, 5, False), first
    session = ["--resume", first["session_id"]]
    more = json.loads(_run([*command, *session, "-p", MORE], home, folder, environment))
    assert more["session_id"] == first["session_id"]
    assert not more["is_error"], more


def codex_script(note: Path) -> list[str]:
    return [
        "Let me read it. " + tool_call("exec_command", cmd=f"cat {note}"),
        "Now I edit it. " + tool_call("exec_command", cmd=f"sed -i s/blue/green/ {note}"),
        "And I look. " + tool_call("exec_command", cmd=f"cat {note}; pwd"),
        "Is it in the picture? " + tool_call("view_image", path=str(note.with_name(PICTURE))),
        LAST,
    ]


def run_codex(binaries: Path, home: Path, folder: Path, url: str) -> None:
    (home / ".codex").mkdir()
    config = _CONFIG.format(model=MODEL, url=url)
    config += f'[projects."{folder}"]\ntrust_level = "trusted"\n'
    (home / ".codex" / "config.toml").write_text(config, encoding="utf-8")
    command = [str(binaries / "codex"), "exec", "--skip-git-repo-check"]
    for arguments in (["--json", ASK], ["resume", "--last", "--json", MORE]):
        lines = _run([*command, *arguments], home, folder, {}).splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        said = [item["text"] for item in items if item["type"] == "agent_message"]
        assert said[-1] == LAST, lines
        assert events[-1]["type"] == "turn.completed", lines


def opencode_script(note: Path) -> list[str]:
    edit = {"filePath": str(note), "oldString": "blue", "newString": "green"}
    return [
        "Let me read it. " + tool_call("read", filePath=str(note)),
        "Now I edit it. " + tool_call("edit", **edit),
        "And I look. " + tool_call("bash", command=f"cat {note}", description="Show the note"),
        "Is it in the picture? " + tool_call("read", filePath=str(note.with_name(PICTURE))),
        LAST,
    ]


def run_opencode(binaries: Path, home: Path, folder: Path, url: str) -> None:
    limit = {"context": 200_000, "output": 32_000}
    modalities = {"input": ["text", "image"], "output": ["text"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": limit, "modalities": modalities}},
    }
    config = {"autoupdate": False, "share": "disabled", "model": f"radixserve/{MODEL}",
              "provider": {"radixserve": provider}}  # fmt: skip
    (folder / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    environment = {f"OPENCODE_DISABLE_{name}": "1" for name in names}
    command = [str(binaries / "opencode"), "run", "--auto", "--format", "json"]
    for arguments in (["--title", "A note", ASK], ["--continue", MORE]):
        lines = _run([*command, *arguments], home, folder, environment).splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        said = [event["part"]["text"] for event in events if event["type"] == "text"]
        assert said[-1] == LAST, lines


def qwen_script(note: Path) -> list[str]:
    edit = {"file_path": str(note), "old_string": "blue", "new_string": "green"}
    shell = {"command": f"cat {note}", "is_background": False, "description": "Show the note"}
    return [
        "Let me read it. " + tool_call("read_file", file_path=str(note)),
        "Now I edit it. " + tool_call("edit", **edit),
        "And I look. " + tool_call("run_shell_command", **shell),
        LAST,
    ]


def run_qwen(binaries: Path, home: Path, folder: Path, url: str) -> None:
    environment = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}
    settings = {"privacy": {"usageStatisticsEnabled": False},
                "general": {"disableAutoUpdate": True}}  # fmt: skip
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [str(binaries / "qwen"), "--auth-type", "openai", "--yolo", "--output-format", "json"]
    for arguments in (["-p", ASK], ["--continue", "-p", MORE]):
        events = json.loads(_run([*command, *arguments], home, folder, environment))
        assert events[-1]["result"] == LAST, events[-1]


def continue_script(note: Path) -> list[str]:
    edit = {"file_path": str(note), "old_string": "blue", "new_string": "green"}
    return [
        "Let me read it. " + tool_call("Read", filepath=str(note)),
        "Now I edit it. " + tool_call("Edit", **edit),
        "And I look. " + tool_call("Bash", command=f"cat {note}"),
        LAST,
    ]


def run_continue(binaries: Path, home: Path, folder: Path, url: str) -> None:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1",
             "apiKey": "none", "roles": ["chat"], "capabilities": ["tool_use"],
             "defaultCompletionOptions": {"contextLength": 200_000}}  # fmt: skip
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    (home / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    environment = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "true"}
    command = [str(binaries / "cn"), "--config", str(home / "config.yaml"), "--auto"]
    for arguments in (["-p", ASK], ["--resume", "-p", MORE]):
        said = _run([*command, *arguments], home, folder, environment)
        assert said.strip().endswith(LAST), said


def cline_script(note: Path) -> list[str]:
    edit = {"path": str(note), "old_text": "blue", "new_text": "green"}
    return [
        "Let me read it. " + tool_call("read_files", files=[{"path": str(note)}]),
        "Now I edit it. " + tool_call("editor", **edit),
        "And I look. " + tool_call("run_commands", commands=["pwd", "cat note.txt # to look"]),
        LAST,
    ]


def run_cline(binaries: Path, home: Path, folder: Path, url: str) -> None:
    # It resumes a session in its terminal interface only.
    program, environment = str(binaries / "cline"), {"CLINE_TELEMETRY_DISABLED": "1"}
    _run([program, "auth", "openai", "-k", "none", "-b", f"{url}/v1", "-m", MODEL],
         home, folder, environment)  # fmt: skip
    command = [program, "--json", "--timeout", "300", ASK]
    lines = _run(command, home, folder, environment).splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert (events[-1]["type"], events[-1]["text"]) == ("run_result", LAST), lines


def run_aider(binaries: Path, home: Path, folder: Path, url: str) -> None:
    environment = {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{url}/v1"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    command = [str(binaries / "aider"), "--model", f"openai/{MODEL}", "--no-git", "--yes-always",
               "--no-check-update", "--no-analytics", "--no-show-model-warnings",
               "--no-show-release-notes"]  # fmt: skip
    for arguments in (["--message", ASK], ["--restore-chat-history", "--message", MORE]):
        said = _run([*command, *arguments, "note.txt"], home, folder, environment)
        assert "Applied edit to note.txt" in said, said


def _run(command: Sequence[str], home: Path, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout[-2_000:], done.stderr[-2_000:])
    return done.stdout


def check_cached(name: str, usages: Sequence[dict[str, Any]], num_turns: int) -> None:
    """One request of the loop for each answer of the script, one of the resumed session, which
    Cline has not. aider has no tools, and rewrites what it sent before; Qwen Code has requests
    beside those of the session."""
    if name == "aider":
        assert len(usages) == 2, usages
        return
    num_resumed = 0 if name == "cline" else 1
    num_asked = num_turns + num_resumed
    assert len(usages) == num_asked or (name == "qwen" and len(usages) > num_asked), usages
    rest = sorted(
        usages[num_turns:], key=lambda usage: usage["prompt_tokens_details"]["cached_tokens"]
    )
    for earlier, later in itertools.pairwise([*usages[:num_turns], *rest[-1:]]):
        cached = later["prompt_tokens_details"]["cached_tokens"]
        known = earlier["prompt_tokens"] + earlier["completion_tokens"]
        assert cached >= known - 1, (cached, known)  # the token that ended the answer
        print(f"  {later['prompt_tokens']} tokens of the prompt, {cached} of them cached")


def check_same(plain: Sequence[Exchange], drafted: Sequence[Exchange]) -> None:
    """Each request and each answer is the same with drafts as without."""
    assert len(plain) == len(drafted), (len(plain), len(drafted))
    for one, other in zip(plain, drafted, strict=True):
        for name, first, second in zip(Exchange._fields, one, other, strict=True):
            pairs = enumerate(zip(first, second, strict=False))
            end = min(len(first), len(second))
            place = next((at for at, (a, b) in pairs if a != b), end)
            seen = [text[max(0, place - 200) : place + 200] for text in (first, second)]
            assert first == second, f"drafts have changed the {name}: {seen}"
    num_characters = sum(len(one.request) + len(one.answer) for one in plain)
    print(f"  {len(plain)} requests and answers of {num_characters} characters are the same")


def check(
    name: str,
    script: Callable[[Path], list[str]],
    run: Callable[[Path, Path, Path, str], None],
    binaries: Path,
) -> None:
    print(name)
    with tempfile.TemporaryDirectory() as temporary:
        model, home, folder = (Path(temporary) / part for part in ("model", "home", "work"))
        note = folder / "note.txt"
        model.mkdir()
        answers = script(note)
        takes_pictures = any(PICTURE in answer for answer in answers)
        make_agent(model, answers, without_tools=WITHOUT_TOOLS.get(name, TITLE),
                   takes_pictures=takes_pictures)  # fmt: skip
        steps: list[int] = []
        exchanges: list[list[Exchange]] = []
        for num_drafts in (0, 32):
            for path in (home, folder):
                path.mkdir()
            note.write_text("The sky is blue.\n", encoding="utf-8")
            note.with_name(PICTURE).write_bytes(as_file(picture(1)))
            with (
                served(model, Path(temporary) / "log", num_drafts) as server,
                Recorder(int(server.url.rpartition(":")[2])) as recorder,
            ):
                run(binaries, home, folder, recorder.url)
                assert note.read_text(encoding="utf-8") == "The sky is green.\n"
                check_cached(name, server.usages(), len(answers))
                assert server.num_encoded() == int(takes_pictures)
                steps.append(server.num_steps())
                exchanges.append(sorted(recorder.exchanges))
            for path in (home, folder):
                shutil.rmtree(path)
        print(f"  {steps[0]} steps without drafts, {steps[1]} with")
        check_same(*exchanges)
        assert steps[1] < steps[0], steps


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names or ("claude", "codex", "opencode"):
        script, run = AGENTS[name]
        check(name, script, run, Path(folder))


AGENTS = {
    "claude": (claude_script, run_claude),
    "codex": (codex_script, run_codex),
    "opencode": (opencode_script, run_opencode),
    "qwen": (qwen_script, run_qwen),
    "continue": (continue_script, run_continue),
    "cline": (cline_script, run_cline),
    "aider": (lambda _: [LAST], run_aider),
}


if __name__ == "__main__":
    main()
