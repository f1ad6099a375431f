"""What a checkpoint says of generation: sampling defaults, end tokens, a text's first token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.models.generation_config import read_sampling_defaults
from radixserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.text.test_byte_fallback import llama2_tokenizer

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')

OWN = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def edit(file: Path, **fields: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **fields}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path, "llama", with_tokenizer=True, eos_ids=[3])
    edit(made / "generation_config.json", **OWN)
    return made


def test_calls_without_params_take_the_models(folder: Path) -> None:
    with Runtime(folder, num_pages=256) as rt:
        expected = SamplingParams(**OWN)
        assert rt.default_sampling_params == expected
        asked = rt.sampling_params(seed=4, temperature=0.9)
        assert (asked.temperature, asked.top_k, asked.seed) == (0.9, 20, 4)
        rt.set_default_sampling_params(seed=7, max_tokens=5)
        assert rt.default_sampling_params == rt.sampling_params()
        with_own = rt.generate("abc")
        assert len(with_own.token_ids) <= 5
        same = rt.generate("abc", SamplingParams(**OWN, seed=7, max_tokens=5))
        assert with_own.token_ids == same.token_ids
        plain = rt.generate("abc", SamplingParams(seed=7, max_tokens=5, temperature=30.0))
        assert plain.token_ids != with_own.token_ids  # taken as it stands
        with rt.branch("abc") as branch, rt.chat(template="{{ messages[0].content }}") as chat:
            assert branch.generate().token_ids == with_own.token_ids
            assert chat.send("abc").token_ids == with_own.token_ids
        with pytest.raises(InvalidRequest, match="top_k"):
            rt.set_default_sampling_params(top_k=-5)
    with Runtime(folder, num_pages=256, generation_config="none") as rt:
        assert rt.default_sampling_params == SamplingParams()


def test_wrong_values_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", temperature="hot", top_p=None, top_k=-9)
    found = read_sampling_defaults(folder)
    assert found == {"min_p": 0.05, "repetition_penalty": 1.1}
    assert "temperature must be" in caplog.text
    assert read_sampling_defaults(None) == {}


def test_those_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_sampling_defaults(path) == {
        "temperature": 0.5, "top_k": 40, "repetition_penalty": 1.25,
    }  # fmt: skip


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
