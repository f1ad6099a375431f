"""The console command, run in-process on the demo model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import radixserve
from radixserve.cli import main
from radixserve.commands import demo, info
from radixserve.commands.demo_run import Answer, DemoRun, Part
from radixserve.config import EngineConfig
from radixserve.output import Completion, Metrics, Usage
from radixserve.request import SamplingParams
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
GREEDY = ["--temperature", "0", "--max-tokens", "5", "--num-pages", "4096"]


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, out.getvalue(), err.getvalue()


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# -- help and errors ------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("demo", "generate", "replay", "info"))
    assert "examples:" in out


def test_every_setting_has_a_flag_with_help() -> None:
    code, out, _ = run("generate", "--help")
    assert code == 0
    words = out.replace("\n", " ")
    names = [
        field.name
        for field in dataclasses.fields(SamplingParams)
        if field.name not in ("n", "best_of", "logits_processors", "keep_special_ids")
    ]
    names += [field.name for field in dataclasses.fields(EngineConfig) if field.name != "seed"]
    for name in [*names, "engine_seed"]:
        flag = name.replace("_", "-")
        assert f"  --{flag} " in words or f"  --{flag}, --no-{flag} " in words, name
    assert "(default: 128)" in words
    assert "subtracted for each occurrence in the output" in " ".join(words.split())


@pytest.mark.parametrize("command", ["demo", "info", "replay"])
def test_command_help_has_examples(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"examples:\n  radixserve {command}" in out


def test_version() -> None:
    assert run("--version") == (0, f"radixserve {radixserve.__version__}\n", "")


def test_help_and_flags_need_no_torch() -> None:
    code = (
        "import sys\n"
        "for heavy in ('torch', 'transformers', 'rich'): sys.modules[heavy] = None\n"
        "from radixserve.cli import main\n"
        "assert main(['generate', '--prompt', 'x', '--max-tokens', '0']) == 2\n"
        "main(['--help'])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "generate" in found.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--bogus"], "--bogus"),
        (["generate", "--prompt", "x", "--file", "y"], "not allowed with"),
        (["generate", "--prompt", "x", "--max-tokens", "many"], "invalid int"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens must be >= 1"),
        (["generate", "--prompt", "x", "--top-p", "nan"], "top_p"),
        (["generate", "--prompt", "x", "--page-size", "0"], "page_size"),
        (["generate", "--prompt", "x", "--kv-cache-memory", "lots"], "kv_cache_memory"),
        (["generate", "--prompt", "x", "--system", "y"], "--chat"),
        (["generate", "--prompt", "x", "--prompt", "y", "--stream"], "single"),
        (["generate", "--prompt", "x", "--stream", "--json"], "not both"),
        (["generate", "--prompt", "\udcff"], "UTF-8"),
        (["generate", "--file", "/no/such/file"], "/no/such/file: No such file"),
        (["generate", "--prompt", "x", "--model", "/no/such/model"], "/no/such/model"),
        (["demo", "--max-nodes", "0"], "--max-nodes"),
        (["generate", "--prompt", "x", "--trace-hash-block", "16"], "needs a trace"),
        (["generate", "--prompt", "x", "--trace", "/no/such/log"], "cannot be written"),
        (["replay"], "TRACE"),
        (["replay", "/no/such/trace"], "/no/such/trace: No such file"),
        (["replay", "x", "--policy", "lru,newest"], "lru, arc, lfu"),
        (["replay", "x", "--index", "btree"], "radix, hash"),
        (["replay", "x", "--order", "random"], "lpm, fcfs, dfs-weight"),
        (["replay", "x", "--cache-tokens", "1T"], '"250k" or "1M"'),
        (["replay", "x", "--cache-tokens", "8", "--page-size", "16"], "page_size"),
        (["replay", "x", "--page-size", "1.5"], "1,16"),
        (["replay", "x", "--page-size", "0"], "--page-size"),
        (["replay", "x", "--policy", ","], "at least one"),
        (["replay", "x", "--limit", "0"], "--limit"),
        (["replay", "x", "--replicas", "2"], "--cache-tokens"),
        (["replay", "x", "--replicas", "x", "--cache-tokens", "1k"], "--replicas"),
        (["replay", "x", "--replicas", "2", "--cache-tokens", "1k", "--router", "y"], "tree"),
        (["replay", "x", "--lease-s", "-1"], "--lease-s"),
        (["replay", "x", "--order", "lpm", "--step-ms", "-1"], "--step-ms"),
        (
            ["replay", "x", "--order", "lpm", "--max-running-requests", "0"],
            "--max-running-requests",
        ),
        (["replay", "x", "--bytes-per-token", "many"], "--bytes-per-token"),
        (["replay", "x", "--bytes-per-token", "1KB", "--model-config", "y"], "not both"),
        (["replay", "x", "--model-config", "/no/such/model"], "/no/such/model"),
        (["info", "--cache", "ram"], "cache must be one of radix, hash, off"),
        (["info", "--cache", "hash", "--eviction", "lfu"], 'eviction must be "lru"'),
    ],
)
def test_wrong_use_is_told_in_a_line(argv: list[str], words: str) -> None:
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("radixserve")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(radixserve.InvalidRequest, match="max_tokens"):
        run("generate", "--prompt", "x", "--max-tokens", "0", "--debug")


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupted)
    code, _, err = run("info")
    assert code == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["info", "--no-model", "--json"]) == 1


# -- demo -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    code, out, err = run("demo", "--json", "--page-size", "16", "--max-tokens", "6")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_demo_counts_add_up(document: dict[str, Any]) -> None:
    assert document["adds_up"] is True
    for run_name in ("cache_on", "cache_off"):
        performance = document[run_name]
        requests = [r for part in performance["parts"] for r in part["requests"]]
        assert len(requests) == 18
        for request in requests:
            added = request["cached_tokens"] + request["computed_tokens"]
            assert added == request["prompt_tokens"]
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens"):
            assert performance[name] == sum(request[name] for request in requests)


def test_demo_reuses_and_answers_the_same(document: dict[str, Any]) -> None:
    first, second, at_once = document["cache_on"]["parts"]
    assert [r["verdict"] for r in first["requests"]] == ["MISS"] + ["HIT"] * 5
    assert [r["verdict"] for r in second["requests"]] == ["HIT"] * 6
    assert sorted(r["verdict"] for r in at_once["requests"]) == ["HIT"] * 5 + ["MISS"]
    assert document["cache_off"]["cached_tokens"] == 0
    assert document["same_answers"] is True
    on = document["cache_on"]
    assert document["hit_rate"] == on["cached_tokens"] / on["prompt_tokens"] > 0.8
    assert document["computed_factor"] > 4


def test_demo_tree_shows_what_is_held(document: dict[str, Any]) -> None:
    (top,) = document["tree"]["namespaces"][""]
    assert top["text"].startswith("<|begin|><|system|>You are a helpful assistant")
    assert top["sequences"] == 2
    assert top["children"]


def test_demo_for_people() -> None:
    code, out, err = run("demo", "--max-tokens", "4", "--max-nodes", "3")
    assert code == 0, err
    assert "\x1b[" not in out
    rows = [line for line in out.splitlines() if line.startswith(("HIT ", "PARTIAL ", "MISS "))]
    assert len(rows) == 18
    for row in rows:
        left, right = row.split("=")[:2]
        _, reused, _, computed = left.replace("+", " + ").split()
        assert int(reused) + int(computed) == int(right.split()[0])
    assert "same answers with and without the cache: yes (18 of 18)" in out
    assert "hit rate" in out
    assert "sequences 2 '<|begin|><|system|>You" in out
    assert "more nodes" in out
    assert max(map(len, out.splitlines())) <= 100


def test_demo_fails_when_counts_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, computed_tokens=5, completion_tokens=1)
    completion = Completion("r", "a", [5], "length", usage, Metrics(0.0, 0.1, 0.2), None)
    tree = {"page_size": 1, "truncated": False, "namespaces": {}}
    broken = DemoRun((Part("part", (Answer("Why?", completion),), 1.0),), tree)
    monkeypatch.setattr(demo, "run_demo", lambda *_: broken)
    code, out, err = run("demo", "--json")
    assert code == 1
    assert json.loads(out)["adds_up"] is False
    assert "'Why?' do not add up" in err


# -- generate -------------------------------------------------------------------------------------


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


# -- replay ---------------------------------------------------------------------------------------


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
    for router in ("tree", "approximate", "session", "round-robin", "random"):
        assert [row[1] for row in rows if row[:1] == [router]] == ["1", "2"]
    code, out, err = run("replay", trace, *flags, "--router", "tree", "--json")
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
    code, out, err = run("replay", trace, "--plot", "hits.png")
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


# -- info -----------------------------------------------------------------------------------------


def test_info_json() -> None:
    code, out, _ = run("info", "--json", "--page-size", "16", "--num-pages", "100")
    assert code == 0
    facts = json.loads(out)
    assert facts["versions"]["radixserve"] == radixserve.__version__
    assert facts["versions"]["torch"]
    assert facts["machine"]["cores"] >= 1
    backends = facts["attention_backends"]
    assert backends["torch"]["used"] is True
    assert backends["cpu"]["used"] is (not unsupported_reason(torch.float32))
    expected = "vectors of" if backends["cpu"]["used"] else unsupported_reason(torch.float32)
    assert expected in backends["cpu"]["why"]
    if not torch.cuda.is_available():
        assert facts["attention_backends"]["flashinfer"]["used"] is False
        assert facts["model"]["device"] == "cpu"
    model = facts["model"]
    assert model["attention_backend"] == ("cpu" if backends["cpu"]["used"] else "torch")
    assert model["pool_tokens"] == 1600
    assert model["pool_bytes"] == 1600 * model["kv_bytes_per_token"]
    assert model["weight_bytes"] == 4 * model["num_parameters"]


def test_the_hash_cache_answers_the_same() -> None:
    hashed = ["--cache", "hash", "--page-size", "16"]
    answers = [run("generate", "--prompt", "Hello", *GREEDY, *more) for more in ([], hashed)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    code, out, _ = run("info", "--json", "--num-pages", "100", *hashed)
    assert code == 0
    assert json.loads(out)["model"]["page_size"] == 16


def test_info_for_people() -> None:
    code, out, _ = run("info", "--num-pages", "100")
    assert code == 0
    assert ("bfloat16:" in out) == (not unsupported_reason(torch.float32))
    for words in ("LlamaForCausalLM", "KV pool", "no graphs, no overlap", "page size"):
        assert words in out
    code, out, _ = run("info", "--no-model")
    assert code == 0
    assert "LlamaForCausalLM" not in out


def test_info_tells_what_layers_need(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma2")
    code, out, _ = run("info", str(tmp_path), "--num-pages", "100")
    assert code == 0
    assert "Gemma2ForCausalLM (native decoder" in out
    assert "with logits soft cap, sliding window in some layers or all" in out
    code, out, _ = run("info", str(tmp_path), "--num-pages", "100", "--json")
    features = json.loads(out)["model"]["attention_features"]
    assert features == ["logits_soft_cap", "sliding_window"]


def test_info_says_why_there_are_no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "there is no C++ compiler: c++ not found"
    monkeypatch.setattr(cpu_ops, "unsupported_reason", lambda _: reason)
    code, out, _ = run("info", "--no-model")
    assert code == 0
    assert f"cannot be used: {reason}" in " ".join(out.split())
    assert out.count('what "auto" takes') == 1
    code, out, _ = run("info", "--no-model", "--json")
    assert code == 0
    backends = json.loads(out)["attention_backends"]
    assert backends["cpu"] == {
        "version": radixserve.__version__,
        "usable": False,
        "used": False,
        "why": reason,
    }
    assert backends["torch"]["used"] is True


# -- names, files, errors and resumed batches -----------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "chat", "generate", "serve", "info"])
def test_one_way_to_name_the_model(command: str) -> None:
    """MODEL everywhere; --model is the same."""
    if command == "serve":
        pytest.importorskip("uvicorn", reason="the server needs the extra [serve]")
    more = {"generate": ["--prompt", "x"]}.get(command, [])
    for named in (["/no/such/model"], ["--model", "/no/such/model"]):
        code, _, err = run(command, *named, *more)
        assert code == 2
        assert "/no/such/model" in err
    code, _, err = run(command, "one", "--model", "two", *more)
    assert (code, err) == (2, "radixserve: error: two models are named, one and two: give one\n")


def test_errors_are_short_and_name_the_option() -> None:
    code, out, err = run("generate", "--promt", "x")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "radixserve generate: error: unknown option --promt; did you mean --prompt?",
        "radixserve generate --help lists what is possible",
    ]
    for argv in (
        ["generate"],
        ["replay"],
        ["nothing"],
        ["generate", "--prompt", "x", "--top-k", "y"],
    ):
        code, _, err = run(*argv)
        assert code == 2
        assert len(err.splitlines()) == 2
    assert "unknown option --max-token; did you mean" in run("info", "--max-token=3")[2] or (
        "unknown option --max-token\n" in run("info", "--max-token=3")[2]
    )


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


def test_info_and_runtime_agree_about_triton_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    facts = json.loads(run("info", "--no-model", "--json")[1])["attention_backends"]["triton"]
    assert facts["usable"]
    assert "only where it is asked for" in facts["why"]
    with radixserve.Runtime("demo", attention_backend="triton", num_pages=64) as rt:
        assert rt.attention_backend == "triton"
        assert rt.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids
