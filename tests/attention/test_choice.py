"""Which backend "auto" stands for, and how others are refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixserve.attention import choice
from radixserve.attention.choice import BACKENDS, choose_backend, make_backend
from radixserve.attention.cuda import flashinfer_calls
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.config import ATTENTION_BACKENDS, EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models import registry
from radixserve_kernels import cpu_ops, gpu_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_calls, "import_error", lambda: "")
    monkeypatch.setattr(gpu_ops, "triton_unsupported_reason", lambda: "")
    monkeypatch.setattr(cpu_ops, "unsupported_reason", lambda _: "")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name", "why"),
    [
        (torch.bfloat16, 128, "flashinfer", ""),
        (torch.float16, 64, "flashinfer", ""),
        (torch.bfloat16, None, "flashinfer", ""),
        (torch.float32, 128, "triton", "no flashinfer: FlashInfer takes float16 and bfloat16"),
        (torch.bfloat16, 80, "triton", "heads of 64, 128, 256, not of 80"),
    ],
)
def test_auto_on_cuda(
    dtype: torch.dtype,
    head_dim: int | None,
    name: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "radixserve"):
        assert choose_backend("auto", dtype, CUDA, head_dim) == name
    assert f"attention on cuda:0: {name}" in caplog.text
    assert why in caplog.text


def test_auto_takes_what_can_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer_calls, "import_error", lambda: "it is not installed")
    assert choose_backend("auto", BF16, CUDA) == "triton"
    monkeypatch.setattr(gpu_ops, "triton_unsupported_reason", lambda: "Triton is not installed")
    assert choose_backend("auto", BF16, CUDA) == "torch"
    assert "slower: no flashinfer: it is not installed; no triton: Triton is not" in caplog.text
    with pytest.raises(ModelNotSupported, match="no attention backend can be used: no flashinfer"):
        choose_backend("auto", torch.float16, CUDA)


def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Never triton, which is only its kernels' references there."""
    assert choose_backend("auto", BF16, CPU) == "cpu"
    monkeypatch.setattr(cpu_ops, "unsupported_reason", lambda _: "there is no compiler")
    assert choose_backend("auto", BF16, CPU) == "torch"
    assert "PyTorch's operations are used, which are slower: no cpu: there is no" in caplog.text


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        ("cpu", CUDA, 'the device is cuda; "auto" and "flashinfer", "triton", "torch" can'),
        ("flashinfer", CPU, 'the device is cpu; "auto" and "cpu", "torch" can'),
        ("triton", torch.device("meta"), 'the device is meta; "auto" and "torch" can'),
    ],
)
def test_one_that_cannot_run_is_refused(asked: str, device: torch.device, message: str) -> None:
    with pytest.raises(ModelNotSupported, match=f'"{asked}" cannot be used: {message}'):
        choose_backend(asked, BF16, device)


def test_one_that_is_asked_for_is_taken() -> None:
    for asked in ("flashinfer", "triton", "torch"):
        assert choose_backend(asked, BF16, CUDA, 128) == asked
    for asked in ("cpu", "triton", "torch"):
        assert choose_backend(asked, BF16, CPU, 128) == asked
    with pytest.raises(ModelNotSupported, match=r"not float32; \"auto\" and \"triton\", \"torch\""):
        choose_backend("flashinfer", torch.float32, CUDA)
    with pytest.raises(ModelNotSupported, match="not with float16"):
        choose_backend("torch", torch.float16, CUDA)


def test_every_backend_can_be_asked_for() -> None:
    assert {"auto", *BACKENDS} == set(ATTENTION_BACKENDS)


def test_a_backend_gets_the_options_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth one needs its row in BACKENDS; nothing else names backends."""

    class Fifth(ReferenceBackend):
        name = "fifth"
        device_types = frozenset(("cpu",))
        is_slow = False
        options = frozenset(("is_exact", "variants"))

        def __init__(self, *given: Any, is_exact: bool, variants: tuple[()], shares: bool) -> None:
            super().__init__(*given, shares=shares)
            self.given = is_exact, variants

        @classmethod
        def unsupported_reason(cls, dtype: torch.dtype, *_: Any, **__: Any) -> str:
            return "" if dtype == torch.float32 else "it takes float32"

    monkeypatch.setattr(choice, "BACKENDS", {"fifth": Fifth, **BACKENDS})
    assert choose_backend("auto", torch.float32, CPU) == "fifth"
    assert choose_backend("auto", BF16, CPU) == "cpu"
    assert choose_backend("auto", BF16, CUDA) == "flashinfer"
    with pytest.raises(ModelNotSupported, match='it takes float32; "auto" and "cpu", "torch"'):
        choose_backend("fifth", BF16, CPU)
    backend = make_backend("fifth", torch.zeros(1, 2, 4, 2, 2, 64), 4, is_exact=True)
    assert isinstance(backend, Fifth)
    assert backend.given == (True, ())


def test_backends_are_made_by_name() -> None:
    kv = torch.zeros(1, 2, 4, 2, 2, 64)
    assert isinstance(make_backend("triton", kv, 4), TritonBackend)
    backend = make_backend("torch", kv, 4, shares=False)
    assert isinstance(backend, ReferenceBackend)
    assert backend.name == "torch"
    with pytest.raises(ModelNotSupported, match="flashinfer backend cannot be used: FlashInfer"):
        make_backend("flashinfer", kv, 4)


def test_a_broken_flashinfer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def fails() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(flashinfer_calls, "load_library", fails)
    monkeypatch.setattr(flashinfer_calls.importlib.util, "find_spec", lambda _: object())
    assert flashinfer_calls.import_error() == "importing FlashInfer failed: OSError: no such file"
    monkeypatch.setattr(flashinfer_calls.importlib.util, "find_spec", lambda _: None)
    assert "not installed" in flashinfer_calls.import_error()


@pytest.mark.parametrize(("head_dim", "name"), [(80, "triton"), (128, "flashinfer")])
def test_heads_of_a_foreign_model_count(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, name: str
) -> None:
    """Their size is known once it is loaded, and not before."""
    model = SimpleNamespace(info=SimpleNamespace(head_dim=head_dim, attention_features=()))
    monkeypatch.setattr(registry, "_load_other", lambda *_: model)
    config = SimpleNamespace(architectures=["OtherForCausalLM"], dtype=BF16)
    source: Any = SimpleNamespace(config=config, path="folder")
    assert registry.load_model(source, EngineConfig(), CUDA) == (model, name)
