"""What a checkpoint says of generation: sampling defaults, end tokens, a text's first token."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from radixserve import EngineConfig, InvalidRequest, Runtime, SamplingParams
from radixserve.gguf_file import GgufFile
from radixserve.models.generation_config import read_gguf_sampling
from radixserve.models.source import find_model
from radixserve.sampling_defaults import describe_sampling
from radixserve.sampling_fields import NEUTRAL
from radixserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.text.test_byte_fallback import llama2_tokenizer

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')

from tests.models.gguf_files import write_gguf  # noqa: E402

OWN = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def edit(file: Path, **fields: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **fields}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path, "llama", with_tokenizer=True, eos_ids=[3])
    edit(made / "generation_config.json", **OWN)
    return made


def test_fields_that_a_call_leaves_out_are_the_models(folder: Path) -> None:
    with Runtime(folder, num_pages=256) as rt:
        expected = SamplingParams(**OWN)
        assert rt.default_sampling_params == expected
        asked = rt.sampling_params(seed=4, temperature=0.9)
        assert (asked.temperature, asked.top_k, asked.seed) == (0.9, 20, 4)
        rt.set_default_sampling_params(seed=7, max_tokens=5)
        assert rt.default_sampling_params == rt.sampling_params()
        with_own = rt.generate("abc")
        assert len(with_own.token_ids) <= 5
        same = SamplingParams(seed=7, max_tokens=5)
        assert with_own.token_ids == rt.generate("abc", SamplingParams(**OWN, **SEEDED)).token_ids
        for answer in (
            rt.generate("abc", same),
            rt.generate(["abc", "abc"], [same, SamplingParams(seed=7, max_tokens=5)])[1],
        ):
            assert answer.token_ids == with_own.token_ids
        plain = rt.generate("abc", SamplingParams(temperature=30.0, top_k=0, **SEEDED))
        assert plain.token_ids != with_own.token_ids
        with rt.branch("abc") as branch, rt.branch("abc") as other:
            assert branch.generate().token_ids == with_own.token_ids
            assert other.generate(same).token_ids == with_own.token_ids
        for params in (None, same):
            with rt.chat(template="{{ messages[0].content }}", params=params) as chat:
                assert chat.send("abc").token_ids == with_own.token_ids
        with pytest.raises(InvalidRequest, match="top_k"):
            rt.set_default_sampling_params(top_k=-5)


SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 5}


def test_neutral_values_that_are_given_are_kept() -> None:
    defaults = SamplingParams(**OWN)
    neutral: dict[str, Any] = dict(NEUTRAL)
    given = SamplingParams(**neutral)
    assert given.with_defaults(defaults) is given
    assert SamplingParams(seed=1).with_defaults(defaults) == SamplingParams(**OWN, seed=1)
    copied = pickle.loads(pickle.dumps(SamplingParams(seed=1)))
    assert copied.with_defaults(defaults) == SamplingParams(**OWN, seed=1)
    assert replace(SamplingParams(), seed=1).with_defaults(defaults).temperature == 0.6
    assert SamplingParams(temperature=0.3).with_defaults(defaults).temperature == 0.3


def test_the_order_of_sources(folder: Path) -> None:
    override = {"temperature": 0.3, "top_k": 0}
    with Runtime(folder, num_pages=256, override_generation_config=override) as rt:
        sources = {name: default.source for name, default in rt.sampling_defaults.items()}
        assert {name: default.value for name, default in rt.sampling_defaults.items()} == {
            **OWN, **override,
        }  # fmt: skip
        assert rt.default_sampling_params == SamplingParams(**{**OWN, **override})
        setting, own = "override_generation_config", "generation_config.json"
        assert sources == {name: setting if name in override else own for name in NEUTRAL}
        rt.set_default_sampling_params(top_p=0.7, seed=3)
        assert rt.sampling_defaults["top_p"] == (0.7, "set_default_sampling_params")
    with Runtime(folder, num_pages=256, generation_config="none") as rt:
        assert rt.default_sampling_params == SamplingParams()
        assert {default.source for default in rt.sampling_defaults.values()} == {"neutral"}
        assert describe_sampling(rt.sampling_defaults) == (
            "temperature 1, top_k 0, top_p 1, min_p 0, repetition_penalty 1 (neutral)"
        )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"temprature": 1}, "did you mean temperature?; allowed: temperature, top_k, top_p"),
        ({"temperature": -1}, "override_generation_config: temperature must be"),
        (["temperature"], "must be {field: value}"),
        ({1: 2}, "unknown field 1"),
    ],
)
def test_a_wrong_override(override: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        EngineConfig(override_generation_config=override)


def test_wrong_values_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", temperature="hot", top_p=None, top_k=-9)
    found = find_model(str(folder)).sampling()
    assert found == ({"min_p": 0.05, "repetition_penalty": 1.1}, "generation_config.json")
    assert "temperature must be" in caplog.text
    assert find_model("random:tiny-llama").sampling().values == {}


def test_those_of_a_gguf_file(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.2)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = {"temperature": 0.2, "top_k": 40, "repetition_penalty": 1.25}
    assert read_gguf_sampling(GgufFile(path)) == (own, "GGUF file")
    plain = write_gguf(tmp_path / "plain.gguf", folder)
    llama_cpp = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert find_model(str(plain)).sampling() == (llama_cpp, "llama.cpp")
    with Runtime(plain, num_pages=256) as rt:
        assert rt.default_sampling_params == SamplingParams(**llama_cpp)


def test_end_tokens_of_config_generation_config_and_tokenizer(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[5, 6])
    edit(folder / "generation_config.json", eos_token_id=7)
    with Runtime(folder, num_pages=256) as rt:
        assert rt.model.eos_ids == tuple(sorted({5, 6, 7, EOS_ID}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert tokenizer.end_ids == {EOS_ID}


def test_a_text_with_the_first_token_gets_no_second_one() -> None:
    made = llama2_tokenizer()
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = Tokenizer(made)
    once = tokenizer.encode("ab")
    assert once[0] == 1
    assert tokenizer.encode("<s>ab").count(1) == 1
    assert tokenizer.encode("<s><s>ab").count(1) == 2  # as it is written
    assert tokenizer.encode_more("<s>ab")[0] == 1
