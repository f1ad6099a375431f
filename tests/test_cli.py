"""The console command, run in-process on the demo model."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import radixserve
from radixserve import Runtime
from radixserve.cli import EXTRAS, build_parser, main
from radixserve.commands import demo, info
from radixserve.commands.flags import CHOICES, given_fields
from radixserve.commands.parser import MAX_WIDTH
from radixserve.completion import Completion
from radixserve.config import EngineConfig
from radixserve.output import Metrics, Usage
from radixserve.recipes.demo import DemoAnswer, DemoRun, Part
from radixserve.request import SamplingParams
from radixserve.server.config import ServerConfig
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint
from tests.help_pages import GOLDEN, help_pages

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


def test_the_command_of_the_compose_file_is_one() -> None:
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    command = services["radixserve"]["command"]
    args = build_parser().parse_args(["demo" if "MODEL" in word else word for word in command])
    fields = given_fields(args, "server.")
    assert ServerConfig(**fields).port == 8000
    assert fields["allowed_host"]


# -- packages that are not there ------------------------------------------------------------------

CACHE_ONLY = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in KEPT:
            raise ModuleNotFoundError(f"No module named {top!r}", name=name)

KEPT = {"numpy", "sortedcontainers", "radixserve", "radixserve_kernels"}
sys.meta_path.insert(0, Missing())
from radixserve.cli import main
for arguments in sys.argv[1:]:
    print(main(arguments.split()), flush=True)
"""


def test_commands_of_a_cache_only_install_name_what_they_need() -> None:
    commands = ("demo", "info", "chat", "generate --prompt a", "pull a/b", "list", "verify")
    done = subprocess.run(
        [sys.executable, "-c", CACHE_ONLY, *commands, "serve demo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["2"] * (len(commands) + 1)
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands) + 1
    needed = r"radixserve: error: this command needs \w+, which is not installed: pip install "
    for line in lines[:-1]:
        assert re.fullmatch(needed + "radixserve", line), line
    assert lines[-1].endswith('pip install "radixserve[serve]"')


def test_the_packages_of_extras_are_those_of_setup_cfg() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    names = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    for package, extra in EXTRAS.items():
        listed = re.findall(r"^[\w-]+", parser["options.extras_require"][extra], re.MULTILINE)
        assert names.get(package, package) in listed or extra == "cuda"


# -- help and errors ------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("demo", "generate", "replay", "info"))
    assert "examples:" in out


def test_every_setting_has_a_flag_with_help() -> None:
    code, out, _ = run("generate", "--help-all")
    assert code == 0
    words = out.replace("\n", " ")
    names = [
        field.name
        for field in dataclasses.fields(SamplingParams)
        if field.name not in ("n", "best_of", "logits_processors", "keep_special_ids")
    ]
    named_otherwise = {"seed": "engine_seed", "adapters": "lora_modules"}
    settings = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in names + [named_otherwise.get(name, name) for name in settings]:
        flag = name.replace("_", "-")
        assert f"  --{flag} " in words or f"  --{flag}, --no-{flag} " in words, name
    assert "(default: 128)" in words
    assert "subtracted for each occurrence in the output" in " ".join(words.split())


def test_help_lists_common_options_and_help_all_the_others() -> None:
    short, full = run("demo", "--help")[1], run("demo", "--help-all")[1]
    assert "--page-size" in short
    assert "--max-overtake" not in short
    assert "--max-overtake" in full
    (count,) = re.findall(r"--help-all +show (\d+) more options", short)
    options = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
    assert len(options.findall(full)) == len(options.findall(short)) + int(count)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_in_the_help_are_those_that_are_taken(name: str) -> None:
    record = EngineConfig if name in EngineConfig.__dataclass_fields__ else ServerConfig
    with pytest.raises(radixserve.InvalidRequest) as refusal:
        record(**{name: "nothing"})
    listed = str(refusal.value).partition("must be one of ")[2].partition(", got")[0]
    assert listed == ", ".join(CHOICES[name])


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays it out in another way")
def test_help_pages_are_those_of_the_golden_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns; `python -m tests.help_pages` writes the file again."""
    monkeypatch.setenv("COLUMNS", "80")
    assert help_pages() == GOLDEN.read_text(), "python -m tests.help_pages"


@pytest.mark.parametrize("columns", [80, 200])
def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = run("serve", "--help-all")[1].split("examples:")[0]
    widest = max(map(len, page.splitlines()))
    assert min(columns, MAX_WIDTH) - 10 < widest <= min(columns, MAX_WIDTH)


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
        (["nonsense"], "there is no command 'nonsense'; commands: demo, chat, generate"),
        (["genrate"], "did you mean generate?"),
        (["serve", "--hots", "x"], "unknown option --hots; did you mean --host?"),
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
        (["replay", "x", "--admission", "priced"], "--admission needs --closed-loop"),
        (["replay", "x", "--closed-loop", "--admission", "cheap"], "greedy, priced"),
        (["replay", "x", "--closed-loop", "--prefill-rate", "0"], "--prefill-rate"),
        (
            ["replay", "x", "--closed-loop", "--plot", "p.png"],
            "--plot does not go with --closed-loop",
        ),
        (["replay", "x", "--advise", "--baseline"], "--baseline does not go with --advise"),
        (["replay", "x", "--advise", "--replicas", "2"], "--replicas does not go with --advise"),
        (["replay", "x", "--advise", "--sessions"], "--sessions does not go with --advise"),
        (["replay", "x", "--advise", "--max-overtake", "3"], "--max-overtake does not go with"),
        (["replay", "x", "--prefill-rate", "3"], "--prefill-rate needs --order"),
        (["replay", "workload:chess"], "workload must be one of chat, multi-turn, rag"),
        (["replay", "workload:rag:x"], "workload:rag:7"),
        (["replay", "x", "--order", "random"], "lpm, fcfs, dfs-weight"),
        (["replay", "x", "--cache-tokens", "1T"], '"250k" or "1M"'),
        (["replay", "x", "--cache-tokens", "8", "--page-size", "16"], "page_size"),
        (["replay", "x", "--page-size", "1.5"], "1,16"),
        (["replay", "x", "--page-size", "0"], "--page-size"),
        (["replay", "x", "--policy", ","], "at least one"),
        (["replay", "x", "--limit", "0"], "--limit"),
        (["replay", "x", "--replicas", "2"], "--cache-tokens"),
        (["replay", "x", "--replicas", "x", "--cache-tokens", "1k"], "--replicas"),
        (["replay", "x", "--failures", "60"], "--failures needs --replicas"),
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
        (["serve", "--autoscaling", "min_replicas=4,max_replicas=2"], "max_replicas must be"),
        (["serve", "--autoscaling", "min_replicas=0,max_replicas=2"], "min_replicas must be"),
        (["serve", "--autoscaling", "max_replicas=2,target=4"], "target_ongoing_requests"),
        (["serve", "--replicas", "3", "--autoscaling", "max_replicas=2"], "replicas must be"),
        (["replay", "x", "--sessions", "--lease-s", "-1"], "--lease-s must be"),
        (["replay", "x", "--lease-s", "5"], "--lease-s needs --sessions"),
        (["replay", "x", "--states", "5"], "--states needs --state-checkpoints"),
        (
            ["replay", "x", "--closed-loop", "--step-costs", "y", "--step-ms", "1"],
            "--step-ms does not go with --step-costs",
        ),
        (
            ["replay", "x", "--closed-loop", "--prefill-rate", "9", "--prefill-us", "1"],
            "--prefill-us does not go with --prefill-rate",
        ),
        (["replay", "x", "--diagnose", "--report", "/no/such/r.html"], "folder does not exist"),
        (["replay", "x", "--order", "lpm", "--step-ms", "-1"], "--step-ms"),
        (
            ["replay", "x", "--order", "lpm", "--max-running-requests", "0"],
            "--max-running-requests",
        ),
        (["replay", "x", "--bytes-per-token", "many"], "--bytes-per-token"),
        (["replay", "x", "--bytes-per-token", "1KB", "--model-config", "y"], "not both"),
        (["replay", "x", "--model-config", "/no/such/model"], "/no/such/model"),
        (["cache", "list", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["cache", "load", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["cache", "list", ".", "--drop"], "--drop does not go with list"),
        (["cache", "prune", "."], "prune needs --size"),
        (["cache", "save", "x"], "save needs --jsonl"),
        (["cache", "load", ".", "--cache", "hash"], 'kv_store needs cache="radix"'),
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


def test_no_copy_of_standard_input_is_left_when_reading_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read() -> bytes:
        raise KeyboardInterrupt

    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=read)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        atexit, "register", lambda *call, **more: at_exit.append(partial(*call, **more))
    )
    assert run("replay", "-")[0] == 130
    for call in at_exit:
        call()
    assert not list(tmp_path.iterdir())


def test_streams_that_the_caller_has_closed_are_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["replay", "-"]) == 2
    assert "the trace is empty" in capsys.readouterr().err
    sys.stdin.close()
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["replay", "workload:chat", "--limit", "2"]) == 0
    sys.stdout.close()


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
def uncached_once() -> Iterator[None]:
    """All runs of the demo take the first one's work without a cache, which is most of the time."""
    run_demo, uncached = demo.run_demo, list[DemoRun]()

    def run_once(runtime: Runtime, *args: Any, **callbacks: Any) -> DemoRun:
        if runtime.config.cache != "off":
            return run_demo(runtime, *args, **callbacks)
        if not uncached:
            uncached.append(run_demo(runtime, *args, **callbacks))
        return uncached[0]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(demo, "run_demo", run_once)
        yield


@pytest.fixture(scope="module")
def document(uncached_once: None) -> dict[str, Any]:
    del uncached_once
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
    assert document["same_bits"] is True
    on = document["cache_on"]
    assert document["hit_rate"] == on["cached_tokens"] / on["prompt_tokens"] > 0.8
    assert document["computed_factor"] > 4


def test_demo_tree_shows_what_is_held(document: dict[str, Any]) -> None:
    (top,) = document["tree"]["namespaces"][""]
    assert top["text"].startswith("<|begin|><|system|>You are a helpful assistant")
    assert top["sequences"] == 2
    assert top["children"]


@pytest.mark.usefixtures("uncached_once")
def test_demo_for_people() -> None:
    code, out, err = run("demo", "--max-tokens", "6", "--max-nodes", "3")
    assert code == 0, err
    assert "\x1b[" not in out
    rows = [line for line in out.splitlines() if line.startswith(("HIT ", "PARTIAL ", "MISS "))]
    assert len(rows) == 18
    for row in rows:
        left, right = row.split("=")[:2]
        _, reused, _, computed = left.replace("+", " + ").split()
        assert int(reused) + int(computed) == int(right.split()[0])
    assert "same bits with and without the cache: yes (18 of 18)" in out
    assert "hit rate" in out
    assert "sequences 2 '<|begin|><|system|>You" in out
    assert "more nodes" in out
    assert max(map(len, out.splitlines())) <= 100


def test_demo_fails_when_counts_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, computed_tokens=5, completion_tokens=1)
    completion = Completion("r", "a", [5], "length", usage, Metrics(0.0, 0.1, 0.2), None)
    tree = {"page_size": 1, "truncated": False, "namespaces": {}}
    broken = DemoRun((Part("part", (DemoAnswer("Why?", completion),), 1.0),), tree)
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


def test_cache_saves_lists_verifies_loads_and_prunes(tmp_path: Path) -> None:
    folder, prompts = str(tmp_path / "kv"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": list(range(3, n))}) + "\n" for n in (50, 90)))
    pages = ["--num-pages", "500", "--json"]
    code, out, _ = run("cache", "save", folder, "--jsonl", str(prompts), *pages)
    assert (code, json.loads(out)) == (0, {"written_tokens": 87})
    code, out, _ = run("cache", "load", folder, *pages)
    assert (code, json.loads(out)) == (0, {"loaded_tokens": 87})
    (group,) = json.loads(run("cache", "list", folder, "--json")[1])["groups"]
    assert (group["namespace"], group["tokens"]) == ("", 87)
    assert "87 tokens in" in run("cache", "list", folder)[1]
    assert run("cache", "verify", folder)[0] == 0
    file = next((tmp_path / "kv").rglob("*.kv"))
    data = file.read_bytes()
    file.write_bytes(data[:4] + b"\xff" + data[5:])  # of a later version: it may be whole
    code, out, _ = run("cache", "verify", folder, "--drop")
    assert (code, "1 files were not checked: its version is not" in out) == (0, True)
    listed = json.loads(run("cache", "list", folder, "--json")[1])
    assert (listed["damaged_files"], [*listed["not_checked"].values()]) == (0, [1])
    file.write_bytes(data[:-1])
    code, out, _ = run("cache", "verify", folder, "--drop")
    assert code == 1
    assert "checksum is wrong" in out
    assert run("cache", "verify", folder)[0] == 0
    code, out, _ = run("cache", "prune", folder, "--size", "1", "--json")
    assert json.loads(out)["bytes"] == 0


def test_cache_save_writes_prompts_that_do_not_fit_into_the_pool_together(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": list(range(first, first + 60))}) for first in (3, 103, 203)]
    prompts.write_text("\n".join(lines))
    argv = ["save", str(tmp_path / "kv"), "--jsonl", str(prompts), "--num-pages", "100"]
    assert run("cache", *argv)[1] == "180 tokens written\n"


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
