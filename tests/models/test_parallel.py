"""A decoder in parts, each in a thread of its own, against the whole one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.models.decoder import Decoder, load_decoder
from radixserve.models.decoder_shape import decoder_shape
from radixserve.models.decoder_tensors import LayerTensors, read_decoder
from radixserve.models.parallel import check_split, shard_head, shard_layer
from radixserve.models.sizes import size_config
from radixserve.models.source import checkpoint
from tests.checkpoints import NATIVE, make_checkpoint
from tests.models.forward_steps import forward_steps
from tests.models.test_gpu_decoder import CPU, NUM_PAGES, World
from tests.pacing import PATIENCE_S


class Rendezvous:
    """Where threads meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.parts: list[Tensor] = [torch.empty(0)] * size


class ThreadTPGroup:
    """See `TPGroup`."""

    def __init__(self, rank: int, size: int, room: Rendezvous) -> None:
        self.rank, self.size, self._room = rank, size, room

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self._meet(x, lambda parts: sum(parts[1:], parts[0])))

    def gather_columns(self, x: Tensor) -> Tensor:
        return self._meet(x, lambda parts: torch.cat(parts, 1))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._meet(x, lambda parts: parts[0]))

    def all_reduce_min(self, number: int) -> int:
        return int(self._meet(torch.tensor(number), lambda parts: torch.stack(parts).min()))

    def _meet(self, x: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        room = self._room
        room.parts[self.rank] = x.clone()
        room.barrier.wait()
        made = make(room.parts)
        room.barrier.wait()
        return made


def split(source: Any, size: int, dtype: torch.dtype = torch.float32) -> list[Decoder]:
    room = Rendezvous(size)
    return [
        load_decoder(source, dtype, CPU, ThreadTPGroup(rank, size, room)) for rank in range(size)
    ]


def loaded_layers(source: Any) -> list[LayerTensors]:
    """Every layer as it is read."""
    layers: list[LayerTensors] = []
    read_decoder(source, torch.float32, CPU, layers.append)
    return layers


def tensors_of(layer: LayerTensors) -> list[Tensor]:
    single = layer.norms.values()
    both = [tensor for pair in layer.projections for tensor in pair]
    return [tensor for tensor in (*single, *both) if tensor is not None]


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"{family} over 2": (family, 2, {}) for family in NATIVE},
    "key heads repeated": ("qwen3", 4, {}),
    "one key head": ("qwen2", 4, {"num_key_value_heads": 1}),
    "all biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "a key head each, biases": ("qwen3", 4, {"num_key_value_heads": 4, "attention_bias": True}),
    "tied, and a vocabulary that does not divide": (
        "qwen2",
        2,
        {"tie_word_embeddings": True, "vocab_size": 287},
    ),
    **{f"{family} over 2": (family, 2, {}) for family in ("cohere2", "gemma2", "glm4", "granite")},
    "a head with a part of zeros": ("llama", 4, {"vocab_size": 261}),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_compute_what_the_whole_does(tmp_path: Path, case: str) -> None:
    family, size, fields = CASES[case]
    source = checkpoint(make_checkpoint(tmp_path, family, seed=5, **fields))
    whole = World(load_decoder(source, torch.float32, CPU), "torch", 2)
    parts = [World(model, "torch", 2) for model in split(source, size)]
    assert parts[0].kv[0].numel() < whole.kv[0].numel() or "one key head" in case
    with ThreadPoolExecutor(size) as pool:
        for rows in forward_steps(1, 2, NUM_PAGES, vocab=257):
            wanted = whole.run(rows)
            for got in pool.map(lambda world, rows=rows: world.run(rows), parts):
                assert got.shape == wanted.shape
                assert torch.allclose(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_rank_keeps_its_part_only(tmp_path: Path) -> None:
    source = checkpoint(make_checkpoint(tmp_path, "qwen3", attention_bias=True))
    (whole,) = split(source, 1)
    parts = split(source, 2)
    for part in parts:
        assert part.info.num_parameters < 0.7 * whole.info.num_parameters
        assert (part.info.num_heads, part.info.num_kv_heads) == (2, 1)
        assert part.info.kv_bytes_per_token * 2 == whole.info.kv_bytes_per_token
    shape = decoder_shape(source.config)
    for layer in loaded_layers(source):
        sharded = [shard_layer(layer, shape, rank, 2) for rank in range(2)]
        for tensor in (tensor for one in sharded for tensor in tensors_of(one)):
            if not any(tensor is norm for norm in layer.norms.values()):
                assert tensor.is_contiguous()
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        matrices = [
            sum(weight.numel() for weight, _ in one.projections) for one in (layer, *sharded)
        ]
        assert matrices[1] + matrices[2] == matrices[0]


def test_bias_of_a_sum_is_added_once(tmp_path: Path) -> None:
    fields = {"attention_bias": True, "mlp_bias": True}
    source = checkpoint(make_checkpoint(tmp_path, "llama", **fields))
    shape = decoder_shape(source.config)
    for layer in loaded_layers(source):
        first, second = (shard_layer(layer, shape, rank, 2) for rank in range(2))
        assert first.o[1] is not None
        assert first.mlp.down[1] is not None
        assert second.o[1] is None
        assert second.mlp.down[1] is None


def test_head_has_as_many_rows_in_every_rank() -> None:
    head = torch.arange(14.0).view(7, 2) + 1
    parts = [shard_head(head, rank, 4) for rank in range(4)]
    assert {part.shape for part in parts} == {(2, 2)}
    assert torch.equal(torch.cat(parts)[:7], head)
    assert not torch.cat(parts)[7:].any()


@pytest.mark.parametrize(
    ("size", "reason"),
    [(3, "32 query heads are no multiple of it; possible are 1, 2, 4, 8, 16, 32"), (64, "query")],
)
def test_what_cannot_be_split_is_refused(size: int, reason: str) -> None:
    shape = decoder_shape(size_config("llama-3-8b"))
    with pytest.raises(InvalidRequest, match=f"tensor_parallel_size={size} cannot .*{reason}"):
        check_split(shape, size)
    check_split(shape, 32)


def test_norms_over_all_heads_are_not_split(tmp_path: Path) -> None:
    shape = decoder_shape(checkpoint(make_checkpoint(tmp_path, "olmo2")).config)
    with pytest.raises(InvalidRequest, match=r"normed over all heads; possible are 1$"):
        check_split(shape, 2)
    check_split(shape, 1)


def test_key_heads_that_cannot_be_shared_evenly_are_refused(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    source = checkpoint(make_checkpoint(tmp_path, "qwen3", **fields))
    with pytest.raises(InvalidRequest, match="2 key/value heads can neither be split nor repeated"):
        split(source, 3)
    assert len(split(source, 6)) == 6
