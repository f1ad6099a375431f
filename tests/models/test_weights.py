"""Checkpoint folders, whole and broken: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.weights import WeightReader
from radixserve.runner.cpu_runner import CpuModelRunner
from tests.checkpoints import EOS_ID, edit_json, make_checkpoint, make_tokenizer

FAMILY_OF_EACH_PATH = ("llama", "olmo")  # native, transformers


def load(folder: Path) -> CpuModelRunner:
    return CpuModelRunner(str(folder), EngineConfig(num_pages=8))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(None, (EOS_ID,)), (3, tuple(sorted((3, EOS_ID)))), ([9, 5, EOS_ID], (5, 9, EOS_ID))],
)
def test_end_tokens(tmp_path: Path, ids: int | list[int] | None, expected: tuple[int, ...]) -> None:
    make_checkpoint(tmp_path, "llama", eos_ids=ids)
    assert load(tmp_path).info.eos_ids == expected


def test_end_tokens_of_config_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", eos_token_id=[4, 2])
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).info.eos_ids == (2, 4)


def test_no_end_tokens(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=None)
    eos_ids = load(tmp_path).info.eos_ids
    assert eos_ids in ((), (2,))  # 2 is LlamaConfig's default where config.json says nothing


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "/no/such/root", ""])
def test_no_such_folder(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"neither a folder nor a hub id|no config\.json"):
        CpuModelRunner(name, EngineConfig(num_pages=8))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        load(tmp_path)


def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be read as JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotSupported, match="model_type"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "from-the-future"}')
    with pytest.raises(ModelNotSupported, match="from-the-future"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotSupported, match="no architecture"):
        load(tmp_path)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a single-file checkpoint; None removes one, '__' stands for '.'."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILY_OF_EACH_PATH)
def test_missing_tensor(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    edit_tensors(tmp_path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelNotSupported, match=r"missing.*layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILY_OF_EACH_PATH)
def test_unexpected_tensor(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    edit_tensors(tmp_path, model__layers__0__mlp__side_proj__weight=torch.zeros(2))
    with pytest.raises(ModelNotSupported, match=r"unexpected.*layers\.0\.mlp\.side_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("family", FAMILY_OF_EACH_PATH)
def test_wrong_shape(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    edit_tensors(tmp_path, model__layers__0__mlp__up_proj__weight=torch.zeros(3, 64))
    with pytest.raises(ModelNotSupported, match=r"up_proj|[Mm]ismatch|size"):
        load(tmp_path)


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path, model__norm__weight=torch.zeros(3))
    with pytest.raises(ModelNotSupported, match=r"model\.norm\.weight is \[3\] and must be \[64\]"):
        load(tmp_path)


def test_quantized_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    tensor = torch.zeros(64, dtype=torch.int8)
    edit_tensors(tmp_path, model__norm__weight=tensor)
    with pytest.raises(ModelNotSupported, match="quantized"):
        load(tmp_path)


def test_old_buffers_are_skipped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    edit_tensors(tmp_path, **{name: torch.zeros(8)})
    load(tmp_path)


def test_tied_head_in_the_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    count = load(tmp_path).info.num_parameters
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lm_head__weight=embedding.clone())
    assert load(tmp_path).info.num_parameters == count


@pytest.mark.parametrize("family", FAMILY_OF_EACH_PATH)
def test_pickled_weights_only(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotSupported, match="pickled weights only"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotSupported, match=r"has no model\.safetensors"):
        load(tmp_path)


def test_index_names_missing_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(InvalidRequest, match=gone.name):
        load(tmp_path)


def test_not_safetensors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidRequest, match="not a safetensors file"):
        load(tmp_path)


def test_reader_names_at_most_a_few(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    reader = WeightReader(tmp_path, torch.float32, torch.device("cpu"))
    for number in range(20):
        reader.take(f"absent.{number}", (1,))
    with pytest.raises(ModelNotSupported, match=r"absent\.5 and 14 more"):
        reader.finish()


def test_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_checkpoint(tmp_path, "llama", with_tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("Grüße, 世界")
    assert tokenizer.decode(ids) == "Grüße, 世界"
    assert len(ids) == len("Grüße, 世界".encode())
    assert tokenizer.eos_token_id == EOS_ID
    assert (
        make_tokenizer(tmp_path)
        .apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        .endswith("<|assistant|>")
    )
