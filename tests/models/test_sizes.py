"""Known sizes and random weights: shapes as published, numbers that any process draws again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from radixserve.attention.base import AttentionMetadata, ForwardBatch, LayerKV, kv_view
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models import decoder
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.decoder_tensors import describe, read_decoder
from radixserve.models.random_weights import CHUNK, RandomWeights
from radixserve.models.registry import load_model
from radixserve.models.sizes import SIZES
from radixserve.models.source import find_model
from radixserve_kernels import experts
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint
from tests.models.forward_steps import forward_steps
from tests.models.test_gpu_decoder import CPU, NUM_PAGES, World, compare

META = torch.device("meta")
PUBLISHED = {  # parameters, KV bytes a token in bfloat16
    "llama-3-8b": (8_030_261_248, 131_072),
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3-70b": (70_553_706_496, 327_680),
    "llama-3.1-70b": (70_553_706_496, 327_680),
    "qwen3-0.6b": (596_049_920, 114_688),
    "qwen3-8b": (8_190_735_360, 147_456),
    "qwen3-32b": (32_762_123_264, 262_144),
    "qwen3-30b-a3b": (30_532_122_624, 98_304),
    "mixtral-8x7b": (46_702_792_704, 131_072),
    "gpt-oss-20b": (20_914_757_184, 49_152),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_as_published(name: str) -> None:
    info = describe(find_model(f"random:{name}"), torch.bfloat16)
    assert info.is_native
    assert info.eos_ids == ()
    if name in PUBLISHED:
        assert (info.num_parameters, info.kv_bytes_per_token) == PUBLISHED[name]
    else:
        assert info.num_parameters < 200_000


def test_described_as_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", eos_ids=[3, 5])
    source = find_model(str(folder))
    assert describe(source, torch.float32) == load_decoder(source, torch.float32, CPU).info
    assert describe(source, torch.float32).eos_ids == (3, 5, 257)  # 257: the tokenizer's


@pytest.mark.parametrize("name", ["llama", "", "llama-3-8B"])
def test_unknown_size(name: str) -> None:
    with pytest.raises(InvalidRequest, match="possible are llama-3-8b, "):
        find_model(f"random:{name}")


# -- random weights -------------------------------------------------------------------------------


def draw(
    name: str, *shape: int, seed: int = 7, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return RandomWeights(seed, std, dtype, CPU).take(name, shape)


def test_weights_are_nearly_normal() -> None:
    weight = draw("model.embed_tokens.weight", 700, 900)
    assert abs(float(weight.mean())) < 1e-4
    assert float(weight.std()) == pytest.approx(0.02, rel=0.01)
    within = (weight.abs() < 0.02).float().mean()
    assert float(within) == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)
    assert 0.06 < float(weight.abs().max()) < 0.07
    rows = torch.corrcoef(weight[:40])
    assert float((rows - torch.eye(40)).abs().max()) < 0.15
    assert len(weight.unique()) > 100_000


def test_weights_are_a_function_of_seed_name_and_place() -> None:
    weight = draw("a.weight", 3, CHUNK["cpu"])  # three chunks
    assert torch.equal(weight, draw("a.weight", 3, CHUNK["cpu"]))
    assert torch.equal(weight.flatten()[:100], draw("a.weight", 100))
    assert not torch.equal(weight, draw("b.weight", 3, CHUNK["cpu"]))
    assert not torch.equal(weight, draw("a.weight", 3, CHUNK["cpu"], seed=8))
    assert torch.equal(weight.bfloat16(), draw("a.weight", 3, CHUNK["cpu"], dtype=torch.bfloat16))
    known = [-0.008279147557914257, -0.0020667477510869503, -0.01968378946185112]
    assert weight[0, :3].tolist() == pytest.approx(known, rel=1e-6)


def test_norms_lie_around_one() -> None:
    norm = draw("model.norm.weight", 5000)
    assert float(norm.mean()) == pytest.approx(1, abs=0.002)
    assert float(norm.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe"])
def test_every_decoder_has_the_same_weights(name: str) -> None:
    source = find_model(f"random:{name}", seed=3)
    expected = load_decoder(source, torch.float32, CPU)
    models: list[tuple[LanguageModel, str]] = [(expected, "torch")]
    models += [(load_decoder(source, torch.float32, CPU), name) for name in ("torch", "triton")]
    if not unsupported_reason(torch.float32):
        models.append((load_cpu_decoder(source, torch.float32), "cpu"))
    for model, backend in models[1:]:
        compare(model, expected, backend, 2, 1e-5)
    other = load_decoder(find_model(f"random:{name}", seed=4), torch.float32, CPU)
    for model, backend in models:
        world = World(model, backend, 2)
        rows = [
            row._replace(sample=None, logprob_targets=None)
            for row in forward_steps(2, 2, NUM_PAGES)[0]
        ]
        assert world.run(rows).shape == (0, 288)
        assert world.kv.any()
    rows = next(rows for rows in forward_steps(0, 1, NUM_PAGES) if rows[0].sample is not None)
    rows = [row._replace(start=0, page_ids=np.arange(len(row.token_ids))) for row in rows[:1]]
    logits = [World(model, "torch", 1).run(rows) for model in (expected, other)]
    assert not torch.allclose(*logits)
    assert float(logits[0].std()) > 0.3  # so that greedy answers have no ties
    assert float(logits[0].abs().max()) < 100


# -- real shapes, without memory ------------------------------------------------------------------


class ShapeBackend:
    """Attention that has shapes only."""

    name = "shapes"

    def __init__(self, kv: torch.Tensor) -> None:
        self.slots = [kv_view(kv, layer) for layer in range(len(kv))]

    def plan(self, batch: ForwardBatch) -> None:
        self.slot_mapping = batch.slot_mapping

    def layer_kv(self, layer: int) -> LayerKV:
        return LayerKV(*self.slots[layer], self.slot_mapping)

    def attend(self, q: torch.Tensor, layer: int, *arguments: object) -> torch.Tensor:
        del layer, arguments
        return torch.empty_like(q)


def meta_batch(num_tokens: int, num_sampled: int) -> ForwardBatch:
    empty = np.empty(0, np.int64)
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=META)
    return ForwardBatch(
        input_ids=tokens,
        positions=tokens,
        slot_mapping=tokens,
        logits_indices=tokens[:num_sampled],
        host=AttentionMetadata(empty, empty, empty, empty, [empty.astype(np.int32)]),
        page_size=16,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_forward_depends_on_no_value(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tensors of the device "meta" have none: what a graph could not record raises here."""
    model = load_decoder(find_model(f"random:{name}"), torch.bfloat16, META)
    info, num_tokens = model.info, 0

    def rope_and_store(qkv: torch.Tensor, *arguments: object, **_: object) -> torch.Tensor:
        k_slots, num_heads, num_kv_heads = arguments[3], arguments[5], arguments[6]
        assert isinstance(k_slots, torch.Tensor)
        assert k_slots.shape == (50 * 16, info.num_kv_heads, info.head_dim)
        assert (num_heads, num_kv_heads) == (info.num_heads, info.num_kv_heads)
        assert qkv.shape == (num_tokens, (info.num_heads + 2 * num_kv_heads) * info.head_dim)
        return qkv.new_empty((num_tokens, info.num_heads, info.head_dim))

    def grouped_linear(x: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        assert isinstance(others[1], torch.Tensor)
        return x.new_empty((len(others[1]), weight.shape[1]))

    monkeypatch.setattr(decoder, "rope_and_store", rope_and_store)
    monkeypatch.setattr(experts, "grouped_linear", grouped_linear)
    shape = (info.num_layers, 2, 50, 16, info.num_kv_heads, info.head_dim)
    backend = ShapeBackend(torch.empty(shape, dtype=info.dtype, device=META))
    for num_tokens, num_sampled in ((64, 64), (512, 3), (512, 0)):
        batch = meta_batch(num_tokens, num_sampled)
        backend.plan(batch)
        logits = model.forward(batch, backend)  # type: ignore[arg-type]
        assert logits.shape == (num_sampled, info.vocab_size)
        assert logits.dtype == torch.float32


def test_table_of_rotations_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = find_model("random:tiny-llama")  # 512 positions, heads of 16: 64 bytes each
    model = load_decoder(source, torch.float32, CPU)
    assert model.tables[0].shape == (512, 16)
    assert load_decoder(source, torch.float32, CPU, None, 100).tables[0].shape == (100, 16)
    assert load_decoder(source, torch.float32, CPU, None, 900).tables[0].shape == (512, 16)
    monkeypatch.setattr(decoder, "TABLE_BYTES", 64 * 200)
    model = load_decoder(source, torch.float32, CPU)
    assert (len(model.tables[0]), model.info.max_positions) == (200, 200)
    assert "limited to 200 of the model's 512 positions" in caplog.text
    model = load_decoder(source, torch.float32, CPU, None, 300)
    assert (len(model.tables[0]), model.info.max_positions) == (300, 512)
    read = read_decoder(source, torch.float32, CPU, lambda _: None)
    pairs = torch.view_as_real(read.rotaries[0].up_to(300)[:300, 0])  # [n, D/2, 2]
    assert torch.equal(model.tables[0], pairs.transpose(1, 2).flatten(1))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("torch", "Decoder"), ("cpu", "CpuDecoder"), ("triton", "Decoder")],
)
def test_which_decoder_runs(backend: str, kind: str) -> None:
    if backend == "cpu" and unsupported_reason(torch.float32):
        pytest.skip("no CPU kernels here")
    config = EngineConfig(attention_backend=backend)
    model, name = load_model(find_model("random:tiny-llama"), config, CPU)
    assert type(model).__name__ == kind
    assert name == backend
