"""Models with random weights from outside: Runtime and the console command."""

from __future__ import annotations

import json

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.test_cli import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [5, 17, 3, 200, 41]


def test_a_runtime_without_text() -> None:
    with Runtime("random:tiny-qwen3", device="cpu", num_pages=200) as rt:
        assert rt.tokenizer is None
        out = rt.generate(PROMPT, GREEDY)
        assert len(out.token_ids) == 6
        assert (out.text, out.finish_reason) == ("", "length")
        assert [chunk.text for chunk in rt.stream(PROMPT, GREEDY)] == [""] * 6
        again = rt.generate(PROMPT, GREEDY)
        assert again.token_ids == out.token_ids
        assert again.usage.cached_tokens == len(PROMPT) - 1
        with pytest.raises(InvalidRequest, match="no tokenizer: give the prompt as token ids"):
            rt.generate("text")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            rt.chat()
        with pytest.raises(InvalidRequest, match="stop strings"):
            rt.generate(PROMPT, SamplingParams(stop="x"))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_same_weights_behind_every_backend(name: str) -> None:
    answers = {}
    for backend in ("cpu", "torch", "triton"):
        if backend == "cpu" and unsupported_reason(torch_float32()):
            continue
        settings = {"device": "cpu", "num_pages": 200, "attention_backend": backend}
        with Runtime(f"random:{name}", **settings) as rt:
            assert rt.attention_backend == backend
            answers[backend] = rt.generate(PROMPT, GREEDY).token_ids
    assert len({tuple(ids) for ids in answers.values()}) == 1
    with Runtime(f"random:{name}", device="cpu", num_pages=200, seed=1) as rt:
        assert rt.generate(PROMPT, GREEDY).token_ids != answers["torch"]


def torch_float32() -> object:
    import torch

    return torch.float32


def test_unknown_sizes_are_told() -> None:
    with pytest.raises(InvalidRequest, match="no config 'llama-4'; possible are llama-3-8b"):
        Runtime("random:llama-4")


# -- the command ----------------------------------------------------------------------------------

RANDOM = ["--config", "tiny-llama", "--random-weights", "--device", "cpu", "--num-pages", "200"]
SHORT = ["--temperature", "0", "--max-tokens", "4"]


def test_generate_prints_token_ids() -> None:
    code, out, err = run("generate", *RANDOM, "--prompt-ids", "5,17 3", *SHORT)
    assert (code, err) == (0, "")
    ids = [int(word) for word in out.split()]
    assert len(ids) == 4
    code, streamed, _ = run("generate", *RANDOM, "--prompt-ids", "5 17 3", *SHORT, "--stream")
    assert (code, streamed) == (0, out)
    code, out, _ = run("generate", *RANDOM, "--prompt-ids", "5, 17, 3", *SHORT, "--json")
    assert code == 0
    answer = json.loads(out)
    assert (answer["token_ids"], answer["text"]) == (ids, "")


def test_generate_draws_prompts() -> None:
    lengths = ["--random-prompt", "20", "--random-prompt", "7"]
    code, out, err = run("generate", *RANDOM, *lengths, *SHORT, "--stats")
    assert code == 0
    assert [line.split(" = ")[0] for line in err.splitlines()] == ["prompt 20", "prompt 7"]
    titles = [line for line in out.splitlines() if line.startswith("---")]
    assert titles == ["--- 1: 20 random tokens", "--- 2: 7 random tokens"]
    assert run("generate", *RANDOM, *lengths, *SHORT)[1] == out
    assert run("generate", *RANDOM, *lengths, *SHORT, "--engine-seed", "1")[1] != out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "llama-3-8b", "--prompt-ids", "1"], "has shapes only: add --random-weights"),
        (["--random-weights", "--prompt-ids", "1"], "--random-weights needs --config"),
        (["--config", "huge", "--random-weights", "--prompt-ids", "1"], "invalid choice"),
        (["--config", "tiny-llama", "--model", "demo", "--prompt-ids", "1"], "not both"),
        ([*RANDOM, "--prompt", "text"], "give --prompt-ids, --random-prompt"),
        ([*RANDOM, "--prompt-ids", "1,x"], "token ids such as 5,17,3, got '1,x'"),
        ([*RANDOM, "--prompt-ids", "1,288"], "token id 288 is out of range"),
        ([*RANDOM, "--prompt-ids", ""], "the prompt is empty"),
        ([*RANDOM, "--random-prompt", "0"], "--random-prompt must be >= 1"),
        ([*RANDOM, "--random-prompt", "9", "--chat"], "--chat makes a prompt of text"),
        ([*RANDOM, "--random-prompt", "9", "--random-prompt", "9", "--stream"], "single prompt"),
    ],
)
def test_wrong_use_is_told(argv: list[str], words: str) -> None:
    code, out, err = run("generate", *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_info_tells_sizes_without_weights() -> None:
    code, out, _ = run("info", "--config", "llama-3-8b", "--json")
    assert code == 0
    model = json.loads(out)["model"]
    assert model["num_parameters"] == 8_030_261_248
    assert model["weight_bytes"] == 2 * 8_030_261_248
    assert model["kv_bytes_per_token"] == 131_072
    assert model["dtype"] == "bfloat16"
    code, out, _ = run("info", "--config", "qwen3-0.6b", "--dtype", "float32")
    assert code == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert lines["parameters"] == "596,049,920 in float32"
    assert lines["KV"] == "224.0 KiB a token in float32"
    assert lines["weights"] == "2.2 GiB"
    code, out, _ = run("info", "--config", "llama-3-8b", "--kv-dtype", "int8", "--json")
    model = json.loads(out)["model"]
    assert (code, model["kv_dtype"]) == (0, "int8")
    assert model["kv_bytes_per_token"] == 131_072 // 2 * 130 // 128


def test_info_of_a_loaded_one() -> None:
    code, out, _ = run("info", *RANDOM, "--json")
    assert code == 0
    model = json.loads(out)["model"]
    assert model["model"] == "random:tiny-llama"
    assert (model["pool_tokens"], model["has_tokenizer"]) == (200, False)
