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


_TWO = ("--replicas", "2", "--cache-tokens", "1k")


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
        (["replay", "x", "--failures", "60"], "--failures needs --replicas"),
        (["replay", "x", "--router", "tree"], "--router needs --replicas"),
        (["replay", "x", *_TWO, "--prefill-us", "9"], "--prefill-us needs --order"),
        (["replay", "x", *_TWO, "--order", "lpm"], "--order does not go with --replicas"),
        (["replay", "x", *_TWO, "--page-size", "16"], "--page-size does not go with --replicas"),
        (["replay", "x", *_TWO, "--sessions"], "--sessions does not go with --replicas"),
        (["replay", "x", *_TWO, "--failures", "0"], "--failures"),
        (["replay", "x", *_TWO, "--autoscaling", "replicas=3"], "max_replicas"),
        (["replay", "x", *_TWO, "--autoscaling", "max_replicas=many"], "max_replicas"),
        (["replay", "x", *_TWO, "--autoscaling", "upscale_delay_s=soon"], "upscale_delay_s"),
        (["replay", "x", *_TWO, "--autoscaling", "max_replicas=1"], "num_replicas"),
        (["replay", "x", *_TWO, "--autoscaling", "min_replicas=2"], "max_replicas"),
        (["replay", "x", *_TWO, "--failures", "60", "--router", "offline"], "offline"),
        (["serve", "--autoscaling", "min_replicas=4,max_replicas=2"], "max_replicas must be"),
        (["serve", "--autoscaling", "min_replicas=0,max_replicas=2"], "min_replicas must be"),
        (["serve", "--autoscaling", "max_replicas=2,target=4"], "target_ongoing_requests"),
        (["serve", "--replicas", "3", "--autoscaling", "max_replicas=2"], "replicas must be"),
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


def test_info_and_runtime_agree_about_triton_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    facts = json.loads(run("info", "--no-model", "--json")[1])["attention_backends"]["triton"]
    assert facts["usable"]
    assert "only where it is asked for" in facts["why"]
    with radixserve.Runtime("demo", attention_backend="triton", num_pages=64) as rt:
        assert rt.attention_backend == "triton"
        assert rt.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids
