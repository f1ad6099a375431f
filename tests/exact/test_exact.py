"""The bits of an answer depend on its own tokens alone: random programs beside requests alone and
without a cache, and `radixserve verify`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve.cli import main
from radixserve.models import hf
from radixserve.models.row_products import pack_products
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.processor import LEVELS
from tests.checkpoints import (
    GGUF_OVERRIDES,
    NATIVE,
    NATIVE_PARTS,
    RECURRENT,
    SHAPED,
    make_checkpoint,
    make_model,
)
from tests.cpu_kernels import cpu_level, num_threads
from tests.exact.programs import SETTINGS, agree_nearly, differences
from tests.models.causal_models import tiny_config

__all__ = ["cpu_level", "num_threads"]
HYBRID = ("qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1")  # one of each kind
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", *HYBRID, *SHAPED)
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "8 bits": {"dtype": "bfloat16", "weight_dtype": "int8"},
    "4 bits": {"dtype": "float32"},  # of a GGUF file
}
OTHER_FAMILIES = tuple(sorted({*NATIVE, *NATIVE_PARTS, *RECURRENT} - set(FAMILIES)))
WRAPPED = ("gpt_neox", "gpt2", "starcoder2_window")
WRAPPED_SIZES = {"hidden_size": 128, "intermediate_size": 256}  # whole vectors of two threads
WRAPPED_HYBRIDS = ("bamba", "jamba")  # wrapped, of Mamba 2 and Mamba layers
Find = Callable[[str], Path]


def cases_of(families: tuple[str, ...]) -> list[tuple[str, str]]:
    """(family, form); of some families no GGUF files are read."""
    return [
        (family, form)
        for family in families
        for form in FORMS
        if form != "4 bits" or family in GGUF_OVERRIDES
    ]


CASES = cases_of(FAMILIES)
NUM_ROUNDS = len(SETTINGS)


def long_runs() -> list[Any]:
    """(family, form, more settings, seed, level, threads) of the long runs, the breadth first.

    Round 0 runs the cases of FAMILIES and WRAPPED at each level with 1 and 2 threads, and those of
    the other families at each level. As many rounds give all but these each of SETTINGS.
    """
    first = [(family, form, {}) for family, form in CASES]
    wrapped = {"model_impl": "transformers"}
    first += [(family, form, wrapped) for family in WRAPPED for form in ("float32", "bfloat16")]
    kept_in_8_bits = [(*case, {"kv_dtype": "int8"}) for case in CASES if case[1] != "4 bits"]
    others = [(family, form, {}) for family, form in cases_of(OTHER_FAMILIES)]
    runs = []
    for round_number, (level_number, level) in product(range(NUM_ROUNDS), enumerate(LEVELS)):
        cases = [*first, *kept_in_8_bits, *([] if round_number else others)]
        for number, (family, form, more) in enumerate(cases):
            has_both = round_number == 0 and number < len(first)
            seed = 100 + (round_number + number) % NUM_ROUNDS
            for threads in (1, 2) if has_both else (1 + (number + level_number) % 2,):
                names = [round_number, level, threads, family, form, *more.values()]
                label = "-".join(map(str, names))
                runs.append(pytest.param(family, form, more, seed, level, threads, id=label))
    return runs


pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """The checkpoint of a family, made once; "family 4 bits": its GGUF file."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        if family.endswith(" 4 bits"):
            from tests.models.gguf_files import write_gguf

            family = family[:-7]
            own = GGUF_OVERRIDES[family]
            if family in ("qwen2_moe", "qwen3_moe"):
                own = {**own, "moe_intermediate_size": 64}  # whole blocks of 32
            if family == "qwen2_moe":
                own = {**own, "shared_expert_intermediate_size": 64}
            make_checkpoint(folder, family, with_tokenizer=True, **own)
            return write_gguf(folder / "model.gguf", folder, "Q4_0")
        if family in WRAPPED_HYBRIDS:
            make_model(tiny_config(family)).save_pretrained(folder)
            return folder
        sizes: dict[str, Any] = WRAPPED_SIZES if family in WRAPPED else {}
        if family == "gpt_neox":
            sizes = {**sizes, "num_key_value_heads": None}
        if family == "starcoder2_window":
            sizes = {**sizes, "num_key_value_heads": 4}
        return make_checkpoint(folder, family, with_tokenizer=family in ("llama", "gpt2"), **sizes)

    def find_folder(family: str) -> Path:
        if family not in made:
            made[family] = make(family)
        return made[family]

    return find_folder


def check_programs(
    find: Find, family: str, form: str, seed: int, num_calls: int, **more: Any
) -> None:
    if form == "4 bits":
        pytest.importorskip("gguf")
        family += " 4 bits"
    model, settings = str(find(family)), {"num_pages": 6_000, **FORMS[form], **more}
    cold = {**settings, "cache": "off", "cascade_attention": False}
    with Runtime(model, **cold) as alone:
        assert alone.resolved_config.inexact == ""
        assert alone.model.is_quantized == ("bits" in form)
        own = {**settings, **SETTINGS[seed % len(SETTINGS)]}
        if alone.model.states:
            own |= random_checkpoints(seed)
        assert not list(differences(model, seed, num_calls, alone, **own)), own


def random_checkpoints(seed: int) -> dict[str, Any]:
    """Settings of recurrent states: how far apart they are kept, and how many fit."""
    drawn = random.Random(seed)
    return {
        "cache": "radix",  # which keeps them
        "checkpoint_interval": drawn.choice([1, 7, 16, 33, 64]),
        "num_states": drawn.randint(12, 90),
        "max_running_requests": drawn.randint(2, 6),
    }


@pytest.mark.parametrize(("family", "form"), CASES)
def test_random_programs(family: str, form: str, find: Find) -> None:
    seed = FAMILIES.index(family) + 2 * list(FORMS).index(form)
    check_programs(find, family, form, seed, 3)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WRAPPED[:2])
def test_random_programs_of_wrapped_models(family: str, form: str, find: Find) -> None:
    """Their linear layers and attention run on the CPU kernels."""
    seed = WRAPPED.index(family) + 2 * (form == "float32")
    check_programs(find, family, form, seed, 3, model_impl="transformers")


@pytest.mark.parametrize(
    ("family", "form", "kv_dtype"),
    [
        ("llama", "float32", "int8"),
        ("gemma3", "bfloat16", "int8"),
        ("gpt_oss", "bfloat16", "int8"),
        ("qwen3", "float32", "bfloat16"),
    ],
)
def test_random_programs_with_another_kv_dtype(
    family: str, form: str, kv_dtype: str, find: Find
) -> None:
    """Prefill attends to what is stored, so that a hit changes nothing."""
    check_programs(find, family, form, FAMILIES.index(family), 4, kv_dtype=kv_dtype)


def test_programs_find_what_is_not_exact(find: Find) -> None:
    """Rows that read shared pages to their last token have other bits."""
    folder, settings = str(find("llama")), {"num_pages": 6_000, "dtype": "float32"}
    with Runtime(folder, **settings, cache="off", cascade_attention=False) as alone:
        found = [list(differences(folder, seed, 4, alone, exact=False)) for seed in range(3)]
    assert any(found)


@pytest.mark.long
@pytest.mark.usefixtures("cpu_level", "num_threads")
@pytest.mark.parametrize(
    ("family", "form", "more", "seed", "cpu_level", "num_threads"),
    long_runs(),
    indirect=["cpu_level", "num_threads"],
)
def test_more_random_programs(
    family: str, form: str, more: dict[str, Any], seed: int, find: Find
) -> None:
    check_programs(find, family, form, seed, 6, **more)


def check_hybrid(find: Find, family: str, seed: int, num_calls: int) -> None:
    settings: dict[str, Any] = {"num_pages": 6_000, "dtype": "float32"}
    own = {**settings, **SETTINGS[seed % len(SETTINGS)], **random_checkpoints(seed)}
    model = str(find(family))
    with Runtime(model, **settings, cache="off") as alone:
        assert alone.resolved_config.inexact.startswith("recurrent layers sum")
        assert not list(differences(model, seed, num_calls, alone, agree_nearly, **own)), own


def test_hybrids_do_not_promise_it(find: Find) -> None:
    """Their recurrent layers compute a chunk of tokens by other sums than single tokens. What is
    promised holds: answers after any checkpoint are the model's, up to rounding."""
    check_hybrid(find, WRAPPED_HYBRIDS[0], 1, 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 103))
@pytest.mark.parametrize("family", WRAPPED_HYBRIDS)
def test_more_programs_of_hybrids(family: str, seed: int, find: Find) -> None:
    check_hybrid(find, family, seed, 6)


def test_digests(find: Find) -> None:
    """A digest is of all logits; none is made unasked."""
    prompt = [5, 6, 7]
    with Runtime(str(find("llama")), num_pages=100) as runtime:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, digest=True)
        first, again = runtime.generate([prompt, prompt], params)
        assert first.digest == again.digest
        assert first.digest is not None
        digests = {first.digest}
        for other in ([5, 6, 8], [6, 7]):
            digests.add(runtime.generate(other, params).digest)
        shorter = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, digest=True)
        digests.add(runtime.generate(prompt, shorter).digest)
        assert len(digests) == 4
        assert runtime.generate(prompt, SamplingParams(max_tokens=2)).digest is None
        beams = runtime.beam_search(prompt, beam_width=2, max_tokens=3)
        assert [beam.digest for beam in beams] == [None, None]
        stopped = SamplingParams(max_tokens=8, temperature=0.0, digest=True, stop=["e"])
        assert runtime.generate(prompt, stopped).digest is not None


def test_where_it_is_not_promised(find: Find) -> None:
    torch_only = {"attention_backend": "torch"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("llama", torch_only, "in another order"),
        ("gpt2", torch_only, "in another order"),
        ("qwen3_moe", {"model_impl": "transformers"}, "products of Qwen3Moe"),
        ("llama", {"model_impl": "transformers"}, "whole vectors"),
    ]
    for family, settings, words in cases:
        with Runtime(str(find(family)), num_pages=100, **settings) as runtime:
            assert words in runtime.resolved_config.inexact


def test_bits_that_differ_are_found_at_load(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wrapped model whose products depend on the number of rows; PyTorch's do so, but not on
    every processor."""

    def pack_inexact(model: torch.nn.Module) -> None:
        pack_products(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda _module, _inputs, output: output * (1 + output.shape[-2] * 2**-20)
                )

    monkeypatch.setattr(hf, "pack_products", pack_inexact)
    settings = {"num_pages": 100, "dtype": "float32", "model_impl": "transformers"}
    with Runtime(str(find("gpt_neox")), **settings) as runtime:
        assert "another number of rows" in runtime.resolved_config.inexact


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == 0
    assert report["requests"] == 14
    variants = {result["variant"]: result for result in report["variants"]}
    assert len(variants) == 8
    assert all(result["cached_tokens"] > 0 for result in variants.values())
    assert variants["a small pool"]["preemptions"] > 0


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe", "gpt2", "bamba"])
def test_verify_other_models(
    family: str, find: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hybrid, one with experts and one in transformers' code; of others verify and info tell why
    they are not exact."""
    lines = [{"prompt": list(range(3, 60 + number)), "max_tokens": 4} for number in range(3)]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = str(find(family))
    code = main(["verify", model, "--jsonl", str(file), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert main(["info", model, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)["model"]
    assert info["exact"] == (family != "bamba")
    assert info["inexact_because"] == report["inexact_because"]
    if info["exact"]:
        assert code == report["differences"] == 0
    else:
        assert "recurrent layers sum" in report["inexact_because"]


def test_verify_finds_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rows that read shared pages to their last token."""
    shared = list(range(3, 80))
    lines = [{"prompt": [*shared, 100 + number], "max_tokens": 8} for number in range(4)]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["verify", "demo", "--jsonl", str(file)]
    assert main(arguments) == 0
    assert "4 requests" in capsys.readouterr().out
    assert main([*arguments, "--no-exact"]) == 1
    out = capsys.readouterr().out
    assert "\n0 differences" not in out
    assert "pages read by each row         0 differ" in out
    file.write_text('{"prompt": 1}\n')
    assert main(arguments) == 2
    assert "line 1" in capsys.readouterr().err
