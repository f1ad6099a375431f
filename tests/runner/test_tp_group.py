"""What ranks say to each other, over gloo: here in threads, which is the same to it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from radixserve.runner.tensor_parallel.group import TIMEOUT, ProcessTPGroup, open_store
from tests.pacing import PATIENCE_S

SIZE = 3
CPU = torch.device("cpu")


def talk(rank: int, store: object) -> dict[str, Tensor]:
    ranks = ProcessTPGroup(store, rank, SIZE, CPU)  # type: ignore[arg-type]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((4, 5), 1 + rank / 128, dtype=dtype)
        assert ranks.all_reduce(x) is x
        found[f"sum in {dtype}"] = x
    found["columns"] = ranks.gather_columns(torch.arange(6.0).view(2, 3).T + 10 * rank)
    tokens = torch.arange(4) * (rank + 1)
    ranks.broadcast(tokens)
    found["tokens"] = tokens
    found["least"] = torch.tensor(ranks.all_reduce_min(7 - rank))
    ranks.abort()  # nobody waits
    ranks.close()
    return found


def test_every_rank_hears_the_same() -> None:
    store = open_store(SIZE)
    with ThreadPoolExecutor(SIZE) as pool:
        others = [pool.submit(talk, rank, open_store(SIZE, store.port)) for rank in (1, 2)]
        first = talk(0, store)
        told = [first, *(other.result(PATIENCE_S) for other in others)]
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in told), name
    assert first["sum in torch.float32"].unique().item() == pytest.approx(3 + 3 / 128)
    # 1, 1.0078125 and 1.015625 are bfloat16; their sum, 3.0234375, rounds once, to 3.03125
    assert first["sum in torch.bfloat16"].unique().item() == 3.03125
    assert first["columns"].tolist() == [
        [0, 3, 10, 13, 20, 23],
        [1, 4, 11, 14, 21, 24],
        [2, 5, 12, 15, 22, 25],
    ]
    assert first["tokens"].tolist() == [0, 1, 2, 3]
    assert first["least"] == 5


def test_programs_have_their_own_default_group() -> None:
    assert not torch.distributed.is_initialized()


class FakeNccl:
    """What is used of NCCL's group, without it."""

    made: list[FakeNccl]

    class Options:
        pass

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        del store
        self.seen = rank, size, options._timeout, os.environ.get(HANDLING)  # type: ignore[attr-defined]
        self.num_aborts = 0
        FakeNccl.made.append(self)

    def abort(self) -> None:
        self.num_aborts += 1
        raise RuntimeError("it was gone already")


HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(("own", "seen"), [(None, "0"), ("1", "1")])
def test_a_lost_rank_does_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch, own: str | None, seen: str
) -> None:
    monkeypatch.delenv(HANDLING, raising=False)
    if own is not None:
        monkeypatch.setenv(HANDLING, own)
    FakeNccl.made = []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(ProcessTPGroup, "_connect", lambda *_: None)
    ranks = ProcessTPGroup(open_store(1), 0, 1, torch.device("cuda", 0))
    (group,) = FakeNccl.made
    assert group.seen == (0, 1, TIMEOUT, seen)
    assert os.environ.get(HANDLING) == own
    ranks.abort()
    ranks.close()
    assert group.num_aborts == 2
