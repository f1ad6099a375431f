"""`radixserve generate` and `radixserve replay`."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

import radixserve
from radixserve.api.progress import loading_bar
from radixserve.models.names import TENSORS_READ
from radixserve.request import SamplingParams
from tests.test_cli import GREEDY, ROOT, feed, run


def test_generate_text_is_what_the_runtime_answers() -> None:
    prompts = ["The json module", "The os module"]
    with radixserve.Runtime("demo", num_pages=4096) as runtime:
        texts = [
            runtime.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5)).text
            for prompt in prompts
        ]
    code, out, err = run("generate", "--prompt", prompts[0], "--stats", *GREEDY)
    assert (code, out) == (0, texts[0] + "\n")
    assert err.startswith("prompt ")
    assert "= reused 0 + computed" in err
    code, out, err = run("generate", "--prompt", prompts[0], "--profile", *GREEDY)
    assert (code, out) == (0, texts[0] + "\n")
    assert "ms a step: schedule " in err
    code, out, _ = run("generate", "--prompt", prompts[0], "--stream", *GREEDY)
    assert (code, out) == (0, texts[0] + "\n")
    code, out, _ = run("generate", "--prompt", prompts[0], "--prompt", prompts[1], *GREEDY)
    wanted = [f"--- {at}: {p}\n{t}\n" for at, (p, t) in enumerate(zip(prompts, texts), 1)]  # noqa: B905
    assert (code, out) == (0, "\n".join(wanted))


def test_an_output_is_replaced_only_once_the_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "answers.txt"
    path.write_text("of an earlier run\n")
    argv = ["generate", "--prompt", "Hello", *GREEDY]
    assert run(*argv, "--output", str(path), "--model", "/no/such/model")[0] == 2
    assert path.read_text() == "of an earlier run\n"
    assert run(*argv, "--output", str(path))[0] == 0
    assert path.read_text() == run(*argv)[1]
    assert run(*argv, "--output", os.devnull)[0] == 0


def test_a_prediction_is_text() -> None:
    (text, *_) = run("generate", "--prompt", "Hello", *GREEDY)[1].splitlines()
    code, out, _ = run("generate", "--prompt", "Hello", *GREEDY, "--prediction", text, "--json")
    assert (code, json.loads(out)["usage"]["accepted_prediction_tokens"] > 0) == (0, True)


def test_generate_from_standard_input_and_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    question = "What is a decorator? é"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    feed(monkeypatch, question.encode())
    chat = ["--chat", "--system", "Be brief."]
    code, out, _ = run("generate", "--file", "-", *chat, "--json", *GREEDY)
    assert code == 0
    feed(monkeypatch, json.dumps({"messages": messages}).encode())
    code, other, _ = run("generate", "--jsonl", "-", *GREEDY)
    assert code == 0
    assert json.loads(out)["token_ids"] == json.loads(other)["token_ids"]
    assert json.loads(out)["usage"] == json.loads(other)["usage"]


def test_generate_file_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    code, _, err = run("generate", "--file", str(tmp_path / "prompt"))
    assert code == 2
    assert "UTF-8" in err


LINES = [
    '{"id": "a", "prompt": "The json module"}',
    "not json",
    "",
    '{"id": [1], "prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 1}',
    '{"messages": [{"role": "user", "content": "Hello"}], "stop": ["e"]}',
    '{"id": 3, "prompt": "x", "bogus": 1}',
    '{"id": 4, "prompt": "x", "max_tokens": 0}',
    '{"prompt": [99999]}',
    '{"prompt": "\\ud800"}',
    '{"prompt": ["a", "b"]}',
    '{"prompt": "x", "messages": []}',
    '{"prompt": ""}',
    "[1]",
    '{"id": "z", "prompt": "The os module"}',
]


def test_generate_json_lines(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes("\n".join(LINES).encode() + b'\n{"prompt": "\xff"}\n')
    code, out, err = run("generate", "--jsonl", str(source), "--output", str(target), *GREEDY)
    assert (code, out) == (1, "")
    assert err.startswith("radixserve: 10 of 14 lines failed")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(answers) == len(LINES)  # one was empty, one was added
    good = [answer for answer in answers if "error" not in answer]
    assert [answer.get("id") for answer in good] == ["a", [1], None, "z"]
    assert len(good[1]["token_ids"]) == len(good[1]["logprobs"]) == 2
    assert "e" not in good[2]["text"]
    for answer in good:
        usage = answer["usage"]
        assert usage["cached_tokens"] + usage["computed_tokens"] == usage["prompt_tokens"]
        assert answer["finish_reason"] in ("stop", "length")
        assert answer["metrics"]["ttft_s"] > 0
    bad = {answer["line"]: answer for answer in answers if "error" in answer}
    assert list(bad) == [2, 6, 7, 8, 9, 10, 11, 12, 13, 15]
    assert "bogus" in bad[6]["error"]
    assert bad[6]["id"] == 3
    assert "max_tokens" in bad[7]["error"]
    assert "out of range" in bad[8]["error"]
    assert "empty" in bad[12]["error"]


def test_generate_json_lines_all_good(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b'{"prompt": "a", "max_tokens": 1}\r\n{"prompt": "b", "max_tokens": 2}\r\n')
    code, out, _ = run("generate", "--jsonl", "-", *GREEDY)
    assert code == 0
    assert [len(json.loads(line)["token_ids"]) for line in out.splitlines()] == [1, 2]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two chats over one system prompt, their turns interleaved."""
    chats, lines = [list(range(40)), list(range(40))], []
    for turn in range(12):
        chat = chats[turn % 2]
        chat += [100 + turn] * 5
        lines.append({"time": turn, "session": f"chat {turn % 2}", "tokens": list(chat)})
        lines[-1]["output_tokens"] = [200 + turn] * 4
        chat += [200 + turn] * 4
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_replay_for_people(trace: str) -> None:
    flags = ["--cache-tokens", "120,1k", "--policy", "lru,arc", "--sessions", "--order", "lpm,fcfs"]
    code, out, err = run("replay", trace, *flags, "--page-size", "1,16", "--index", "radix,hash")
    assert (code, err) == (0, "")
    assert "12 requests in 11 s, 2 sessions" in out
    for words in ("reusable at all", "next GiB", "block size loses", "which policy fits", "TTFT"):
        assert words in out
    rows = [line.split() for line in out.splitlines()]
    for label in ("lru", "arc", "lru+sessions", "arc+sessions", "hash", "clairvoyant"):
        assert any(row[:1] == [label] for row in rows), label
    assert max(map(len, out.splitlines())) <= 100


def test_replay_with_replicas(trace: str) -> None:
    flags = ["--replicas", "1,2", "--cache-tokens", "300"]
    code, out, err = run("replay", trace, *flags)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["tree"]] == ["1", "2"]
    code, out, err = run("replay", trace, *flags, "--json")
    (found,) = json.loads(out)["traces"]
    assert [row["replicas"] for row in found["replicas"]] == [1, 2]
    assert found["replicas"][0]["hit_rate"] == found["replicas"][0]["one_cache_hit_rate"]


def test_replay_json(trace: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}')
    flags = ["--json", "--cache-tokens", "1k", "--model-config", str(config), "--limit", "10"]
    code, out, err = run("replay", trace, trace, *flags)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["radixserve"] == radixserve.__version__
    one, two = document["traces"]
    one["runs"][0].pop("seconds")
    two["runs"][0].pop("seconds")
    assert one == two
    assert one["requests"] == 10
    assert one["answers"]["bytes_per_token"] == 2 * 2 * 4 * 8 * 2
    assert one["runs"][0]["hit_tokens"] == one["reusable_tokens"] > 0


def test_replay_chooses_sizes_and_draws(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.svg"
    code, _, err = run("replay", trace, "--plot", str(picture))
    assert (code, err) == (0, "")
    assert picture.read_text().lstrip().startswith("<?xml")
    code, _, err = run("replay", trace, "--plot", str(tmp_path / "hits.bogus"))
    assert code == 2
    assert "must end in one of" in err


def test_replay_without_matplotlib_says_what_to_install(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    for options in (["--plot", "hits.png"], ["--advise", "--report", "advice.html"]):
        code, out, err = run("replay", trace, *options)
        assert (code, out) == (2, "")
        assert "radixserve[plot]" in err


def test_replay_names_a_bad_line(trace: str) -> None:
    with open(trace, "a", encoding="utf-8") as file:
        file.write('{"tokens": [1, "a"], "time": 12}\n')
    code, _, err = run("replay", trace)
    assert code == 2
    assert f"{trace}:13: " in err


def test_what_generate_records_can_be_replayed(tmp_path: Path) -> None:
    log = str(tmp_path / "log.jsonl")
    generate = ["generate", "--prompt", "The json module", "--trace", log, *GREEDY]
    for flags in ([], ["--prompt", "The os module"]):
        code, _, err = run(*generate, *flags)
        assert code == 0, err
    code, out, err = run("replay", log, "--json")
    assert code == 0, err
    assert json.loads(out)["traces"][0]["requests"] == 3


def test_a_batch_says_what_failed_and_goes_on(tmp_path: Path) -> None:
    lines = [{"prompt": f"line {at}", "id": at} for at in range(4)]
    lines[1]["prompt"] = ""
    batch, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["generate", "--jsonl", str(batch), "--output", str(output), *GREEDY]
    code, _, err = run(*flags)
    assert code == 1
    assert 'radixserve: 1 of 4 lines failed: each has an "error" in the output' in err
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:9])  # as if it had been killed there
    code, _, err = run(*flags, "--resume")
    assert (code, err) == (0, "")
    texts = [[json.loads(line).get(name) for name in ("id", "text", "error")] for line in whole]
    again = output.read_text().splitlines()
    assert [[json.loads(x).get(n) for n in ("id", "text", "error")] for x in again] == texts
    assert run(*flags, "--resume")[0] == 0  # nothing is left
    batch.write_text(json.dumps(lines[0]) + "\n")
    assert "4 answers and the batch 1 lines" in run(*flags, "--resume")[2]
    assert "--resume needs --jsonl and" in run("generate", "--prompt", "x", "--resume")[2]


def test_the_bar_of_a_batch_reaches_its_end_with_failed_lines(tmp_path: Path) -> None:
    pytest.importorskip("termios", reason="terminals of other systems")
    from tests.terminal import Terminal

    batch = tmp_path / "in.jsonl"
    batch.write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": "b"}\n')
    command = ["-m", "radixserve", "generate", "--jsonl", str(batch), *GREEDY]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    with Terminal([*command, "--output", str(tmp_path / "out.jsonl")], path) as terminal:
        assert terminal.exit_code() == 1
        shown = terminal.printed.decode()
    assert re.search(r"loading demo: 100%\|█+\| (\d+)/\1 tensors \[\d\d:\d\d\]", shown), shown
    lines = re.sub(r"\x1b\[[A-Z]", "", shown).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80  # a longer line would break, and the next one stand below it
    last_bars = re.findall(r"100%\|.* 3/3, 1 failed, (\d+) \+ (\d+) tok", shown)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    usages = [answer["usage"] for answer in answers if "usage" in answer]
    counts = (
        sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")
    )
    assert last_bars[-1:] == [tuple(map(str, counts))], shown


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_handler", [False, True])
def test_notices_stand_above_the_bar_of_loading(
    monkeypatch: pytest.MonkeyPatch, *, has_handler: bool
) -> None:
    """Once, whether the program prints logs itself or not; logging is as before afterwards."""
    terminal, root = FakeTerminal(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()] if has_handler else [])
    package, tensors = logging.getLogger("radixserve"), logging.getLogger(TENSORS_READ)
    before = list(package.handlers), tensors.level, tensors.propagate, list(root.handlers)
    with loading_bar("model"):
        package.warning("kernels are compiled")
        tensors.debug("%d of %d tensors", 3, 12)
    after = list(package.handlers), tensors.level, tensors.propagate, list(root.handlers)
    assert after == before
    shown = terminal.getvalue()
    assert shown.count("kernels are compiled\n") == 1
    assert "loading model [00:00]" in shown
    assert re.search(r"loading model:  25%\|.*\| 3/12 tensors \[00:\d\d\]", shown)
    assert shown.rstrip(" ").endswith("\r")  # the line goes


def test_an_empty_answer_of_a_chat_model_has_a_hint() -> None:
    flags = ["generate", "--prompt", "Hello", "--logit-bias", "{}:100", "--max-tokens", "3"]
    with radixserve.Runtime("demo", num_pages=64) as rt:
        (end,) = rt.model.eos_ids[:1]
    flags[4] = f"{end}:100"
    code, out, err = run(*flags, "--num-pages", "4096")
    assert (code, out.strip()) == (0, "")
    assert "the model is made for chats: try --chat" in err
    assert "--chat" not in run(*flags, "--chat", "--num-pages", "4096")[2]


def test_standard_input_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"time": 0, "tokens": [1, 2, 3, 4], "output_tokens": [5]}
    feed(monkeypatch, json.dumps(line).encode() + b"\n")
    code, out, err = run("replay", "-", "--json", "--cache-tokens", "1k")
    assert (code, err) == (0, "")
    assert json.loads(out)["traces"]
    feed(monkeypatch, b"{{ messages[0].content }}")
    assert run("chat", "--template", "-", "--num-pages", "4096")[0] == 0
