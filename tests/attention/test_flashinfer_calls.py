"""What is passed to FlashInfer, when, and which of its kernels run what.

That the results are right is for test_backends.py and test_paged_graph.py: there, too, every call
is bound to the recorded signatures.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.attention.base import AttentionVariant
from radixserve.attention.cuda import flashinfer as flashinfer_backend
from radixserve.attention.cuda import flashinfer_calls
from radixserve.attention.cuda.flashinfer import (
    FlashInferBackend,
    can_merge,
    graph_workspace_bytes,
    wants_tensor_cores,
    workspace_bytes,
)
from radixserve.attention.cuda.flashinfer_calls import (
    HeadShape,
    compile_modules,
    flashinfer_unsupported_reason,
    import_error,
)
from radixserve.attention.cuda.metadata import PlanUploader, layout
from radixserve.errors import ModelNotSupported
from radixserve_kernels.gpu.kernel_choice import KernelChoice, choice_of, read_table
from tests.attention.cases import LENGTHS, SHARED, Case, SharedCase, run
from tests.attention.conftest import MakePaged
from tests.attention.fake_flashinfer import SIGNATURES, Fake, FakeDecode, Module
from tests.attention.signatures import RECORD, installed, recorded_version

BF16 = torch.bfloat16
SHAPE = {"heads": 8, "kv_heads": 2, "dim": 64, "dtype": BF16}


def test_the_record_is_what_is_installed() -> None:
    """Made again by tools/record_flashinfer.py where another version is wanted."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        pytest.skip("FlashInfer is not installed")
    if found != recorded_version():
        pytest.skip(f"FlashInfer {found} is installed, {recorded_version()} was recorded")
    if reason := import_error():
        pytest.skip(reason)
    assert installed() == json.loads(RECORD.read_text())["calls"]


def test_the_record_is_of_the_version_that_is_asked_for() -> None:
    wanted = (RECORD.parent.parent.parent / "setup.cfg").read_text()
    assert f"flashinfer-python=={recorded_version()}\n" in wanted


# -- which kernels run what -----------------------------------------------------------------------


def calls_of(fake: Fake, backend: FlashInferBackend, case: Case) -> list[str]:
    fake.calls.clear()
    out = run(backend, case)
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=3e-2, rtol=0.1)
    return list(fake.calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_run_in_the_kernel_of_their_kind(
    dtype: torch.dtype, fake: Fake, make_flashinfer: MakePaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backend, "wants_tensor_cores", lambda *_: False)
    cases = [Case(LENGTHS[n], 2, **SHAPE | {"dtype": dtype}) for n in ("decodes", "chunks")]
    mixed = Case(LENGTHS["everything"], 2, **SHAPE | {"dtype": dtype})
    decode = ["decode", "decode.plan", "decode.plan keywords", "decode.run"]
    extend = ["prefill", "prefill.plan", "prefill.run"]
    for case, expected in zip(cases, (decode, extend), strict=True):
        backend = make_flashinfer(case.kv, 8)
        assert calls_of(fake, backend, case) == expected
    backend = make_flashinfer(mixed.kv, 8)
    assert sorted(calls_of(fake, backend, mixed)) == sorted(decode + extend)
    again = calls_of(fake, backend, mixed)
    assert again == ["fast_decode_plan", "prefill.plan", "decode.run", "prefill.run"]
    assert {one["q_data_type"] for one in fake.arguments if "q_data_type" in one} == {dtype}


def test_decodes_in_the_kernel_for_tensor_cores(
    fake: Fake, make_flashinfer: MakePaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs through the prefill wrapper, whose plan reads nothing from the device."""
    monkeypatch.setattr(flashinfer_backend, "wants_tensor_cores", lambda *_: True)
    case = Case(LENGTHS["decodes"], 2, **SHAPE)
    backend = make_flashinfer(case.kv, 8)
    assert calls_of(fake, backend, case) == ["prefill", "prefill.plan", "prefill.run"]
    assert fake.arguments[-2]["causal"] is False
    fake.calls.clear()
    backend.make_graph_backend(4, 99).plan(case.batch)
    planned = ["decode.plan", "decode.plan keywords", "fast_decode_plan"]
    assert fake.calls == ["decode", "decode.reset_workspace_buffer", *planned]


@pytest.mark.usefixtures("always_share")
def test_shared_pages_run_without_a_mask_and_are_merged(
    fake: Fake, make_flashinfer: MakePaged
) -> None:
    lengths, groups = SHARED["three levels"]
    case = SharedCase(lengths, 2, groups, **SHAPE)
    calls = calls_of(fake, make_flashinfer(case.kv, 8), case)
    plans = [one for one in fake.arguments if "paged_kv_indptr" in one]
    assert [one["causal"] for one in plans].count(False) >= 3  # and that of the decodes
    assert calls.count("merge_state_in_place") == 3
    assert calls.count("prefill.run") + calls.count("decode.run") == 5
    flat = calls_of(fake, make_flashinfer(case.kv, 8, shares=False), case)
    assert "merge_state_in_place" not in flat
    assert flat.count("prefill.run") + flat.count("decode.run") == 2


def test_where_the_scale_goes(fake: Fake, make_flashinfer: MakePaged) -> None:
    case = Case(LENGTHS["everything"], 2, **SHAPE)
    backend = make_flashinfer(case.kv, 8)
    for scale, expected in ((None, 0.125), (0.7, 0.7)):
        run(backend, case, 1, scale)
        runs = [one for one in fake.arguments if "q_scale" in one]
        assert runs[-1]["q_scale"] == pytest.approx(expected)


# -- plans and the pinned memory they are copied from ---------------------------------------------


class WatchedUploader(PlanUploader):
    """Notes when a plan begins and ends among FlashInfer's calls."""

    def __init__(self, fake: Fake) -> None:
        super().__init__(torch.device("cpu"))
        self._notes = fake.calls

    def begin(self) -> None:
        self._notes.append("begin")
        super().begin()

    def end(self) -> None:
        self._notes.append("end")
        super().end()


@pytest.mark.usefixtures("always_share")
def test_plans_lie_between_two_events(fake: Fake, make_flashinfer: MakePaged) -> None:
    """FlashInfer copies from pinned memory: no plan may begin before the copies of the last."""
    lengths, groups = SHARED["two groups and strangers"]
    case = SharedCase(lengths, 2, groups, **SHAPE)
    decodes = Case(LENGTHS["decodes"], 2, **SHAPE)
    backend = make_flashinfer(torch.zeros(2, 2, 400, 2, 2, 64, dtype=BF16), 8)
    backend.uploader = WatchedUploader(fake)
    graph = backend.make_graph_backend(8, 400, 1)
    backend.plan(case.batch)
    graph.plan(decodes.batch)
    backend.plan(decodes.batch)
    is_open, num_plans = False, 0
    for call in fake.calls:
        if call in ("begin", "end"):
            assert is_open == (call == "end")
            is_open = not is_open
        elif "plan" in call:
            assert is_open, f"{call} outside of begin and end"
            num_plans += 1
    assert num_plans >= 8
    assert fake.calls.count("begin") == 4


def test_a_plan_waits_for_the_copies_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    event = SimpleNamespace(
        synchronize=lambda: events.append("waited"), record=lambda: events.append("recorded")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    uploader = PlanUploader(torch.device("cuda"))
    uploader.begin()
    uploader.end()
    uploader.begin()
    assert events == ["recorded", "waited"]


def test_arrays_are_staged_aligned() -> None:
    places, total = layout([3, 0, 4, 5, 1])
    assert [(one.start, one.stop) for one in places] == [(0, 3), (4, 4), (4, 8), (8, 13), (16, 17)]
    assert total == 17
    assert layout([]) == ([], 0)
    uploader = PlanUploader(torch.device("cpu"))
    uploader.begin()
    first = [np.arange(n, dtype=np.int32) for n in (3, 5)]
    second = [array + 7 for array in first]
    for arrays, sides in [(arrays, uploader.upload(arrays)) for arrays in (first, second)]:
        for side in sides:
            assert [one.tolist() for one in side] == [array.tolist() for array in arrays]


# -- what heads are served, and by what -----------------------------------------------------------


def heads(num: int, kv: int, dim: int = 128, page_size: int = 16) -> HeadShape:
    return HeadShape(num, kv, dim, page_size, BF16, BF16)


def test_heads_that_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        flashinfer_unsupported_reason(BF16, 128)
        == flashinfer_unsupported_reason(torch.float16, 64)
        == flashinfer_unsupported_reason(BF16)
        == ""
    )
    assert "float16 and bfloat16, not float32" in flashinfer_unsupported_reason(torch.float32)
    assert "heads of 64, 128, 256, not of 80" in flashinfer_unsupported_reason(BF16, 80)
    library = Fake().library
    for kv, num_heads, message in (
        (torch.zeros(1, 2, 1, 1, 2, 64), 2, "float16 and bfloat16, not float32"),
        (torch.zeros(1, 2, 1, 1, 2, 80, dtype=BF16), 2, "not of 80"),
        (torch.zeros(1, 2, 1, 1, 2, 64, dtype=BF16), 3, "evenly"),
    ):
        with pytest.raises(ModelNotSupported, match=message):
            FlashInferBackend(kv, num_heads, library=library)
    monkeypatch.setattr(flashinfer_calls, "import_error", lambda: "it is not there")
    with pytest.raises(ModelNotSupported, match="cannot be used: it is not there"):
        FlashInferBackend(torch.zeros(1, 2, 1, 1, 2, 64, dtype=BF16), 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((32, 8), {1: True, 33: True, 34: False, 64: False, 131: False, 132: True, 256: True}),
        ((16, 8), {1: False, 64: False, 500: False}),  # two query heads are little to multiply
        ((8, 8), {1: False, 500: False}),
        ((32, 4), {1: True, 64: True, 256: True}),
        ((40, 8), {1: True, 64: True}),  # five: not compiled for CUDA cores
        ((6, 1), {264: True, 265: False, 1055: False, 1056: True}),
    ],
)
def test_which_decodes_take_tensor_cores(shape: tuple[int, int], expected: dict[int, bool]) -> None:
    found = {num_rows: wants_tensor_cores(num_rows, heads(*shape), 132) for num_rows in expected}
    assert found == expected


def test_a_measured_choice_goes_before_the_rule() -> None:
    choice = KernelChoice(decode={"4": {"8": "cuda", "64": "tensor"}})
    expected = {1: False, 8: False, 9: True, 64: True, 500: True}
    found = {rows: wants_tensor_cores(rows, heads(32, 8), 132, choice) for rows in expected}
    assert found == expected
    assert not wants_tensor_cores(64, heads(16, 8), 132, choice)  # two query heads: the rule
    assert wants_tensor_cores(1, heads(40, 8), 132, KernelChoice(decode={"5": {"1": "cuda"}}))


def test_the_table_of_choices(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    entry = {"decode": {"4": {"1": "tensor"}}, "fa3": True, "extend_tile": [64, 64, 4, 3]}
    table.write_text(json.dumps({"A card": entry, "Another": {}}))
    found = read_table(table)
    assert found["A card"] == KernelChoice({"4": {"1": "tensor"}}, True, (64, 64, 4, 3))
    assert found["Another"] == KernelChoice() == choice_of(torch.device("cpu"))
    assert all(name.isprintable() for name in read_table())  # the one that is committed


@pytest.mark.parametrize(
    ("name", "expected"),
    [("long chunks", "fa3"), ("long chunk", "fa2"), ("chunks", "fa2"), ("everything", "fa2")],
)
def test_long_queries_where_fa3_was_faster(
    name: str, expected: str, fake: Fake, make_flashinfer: MakePaged
) -> None:
    case = Case(LENGTHS[name], 2, **SHAPE)
    backend = make_flashinfer(case.kv, 8)
    assert isinstance(backend, FlashInferBackend)
    run(backend, case)
    assert {one["backend"] for one in fake.arguments if "backend" in one} == {"fa2"}
    fake.arguments.clear()
    backend.choice = KernelChoice(fa3=True)
    run(backend, case)
    made = [one["backend"] for one in fake.arguments if "backend" in one]
    assert made == (["fa3"] if expected == "fa3" else [])  # else the wrapper that is there


@pytest.mark.usefixtures("always_share")
def test_heads_that_one_block_can_merge(fake: Fake, make_flashinfer: MakePaged) -> None:
    assert can_merge(64, 128, BF16)
    assert not can_merge(65, 128, BF16)
    assert can_merge(32, 256, BF16)
    assert not can_merge(64, 256, BF16)
    assert can_merge(128, 64, BF16)
    lengths, groups = SHARED["decodes"]
    many = SharedCase(lengths, 2, groups, heads=130, kv_heads=2, dim=64, dtype=BF16)
    assert "merge_state_in_place" not in calls_of(fake, make_flashinfer(many.kv, 130), many)


def test_workspaces_hold_what_the_planner_takes() -> None:
    """Its formula: query heads x tiles x tile x (head_dim + 1) float32, tiles rounded up."""
    llama = heads(32, 8)
    assert 33 * 128 * 32 * 129 * 4 <= workspace_bytes(llama, 132) <= 80e6
    for num_rows in (1, 64, 256, 1024):  # 4 query heads of each row are one tile of 16
        needed = (num_rows + num_rows // 4) * 16 * 32 * 129 * 4
        assert graph_workspace_bytes(llama, 132, num_rows, num_rows) >= needed
    tiles = -(-256 * 4 // 128) + 67 - 1
    assert graph_workspace_bytes(llama, 132, 67, 256) >= tiles * 128 * 32 * 129 * 4


# -- compiling ahead ------------------------------------------------------------------------------


def watch_compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is handed to FlashInfer's compiler from now on, each with its arguments."""
    built: list[tuple[str, dict[str, Any]]] = []

    def bound(name: str) -> Any:
        def call(*args: Any) -> Any:
            found = SIGNATURES[name].bind(*args).arguments
            if name == "build_jit_specs":
                built.extend(found["specs"])
            return name, found

        return call

    modules = {
        "flashinfer.jit.attention": ("gen_batch_decode_module", "gen_batch_prefill_module"),
        "flashinfer.jit.cascade": ("gen_cascade_module",),
        "flashinfer.jit.core": ("build_jit_specs",),
    }
    for module in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    for module, names in modules.items():
        monkeypatch.setitem(
            sys.modules, module, SimpleNamespace(**{name: bound(name) for name in names})
        )
    return built


def compiled_modules(
    monkeypatch: pytest.MonkeyPatch, variants: list[AttentionVariant], *, fa3: bool
) -> list[Module]:
    """The modules of attention that are compiled for a model with these variants."""
    built = watch_compiler(monkeypatch)
    compile_modules(heads(32, 8), variants, fa3=fa3)
    return [
        (found.get("backend", "decode"), found["use_sliding_window"], found["use_logits_soft_cap"])
        for name, found in built
        if name != "gen_cascade_module"
    ]


def test_all_modules_are_compiled_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    built = watch_compiler(monkeypatch)
    compile_modules(heads(32, 8))
    names = ["gen_batch_decode_module", "gen_batch_prefill_module", "gen_cascade_module"]
    assert [name for name, _ in built] == names
    for _, found in built[:2]:
        assert found["head_dim_qk"] == found["head_dim_vo"] == 128
        assert found["dtype_q"] == found["dtype_kv"] == found["dtype_o"] == BF16
        assert found["dtype_idx"] == torch.int32
        assert found["pos_encoding_mode"] == 0
        assert not found["use_sliding_window"]
        assert not found["use_logits_soft_cap"]
    assert built[1][1]["backend"] == "fa2"
    compile_modules(heads(32, 8), fa3=True)
    assert [found["backend"] for _, found in built[3:] if "backend" in found] == ["fa2", "fa3"]


def test_a_compiler_that_fails(make_flashinfer: MakePaged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: HeadShape, variants: tuple[AttentionVariant, ...], *, fa3: bool) -> None:
        assert variants == (AttentionVariant(),)
        assert not fa3
        raise RuntimeError("Ninja build\n failed" + more)

    more = ""
    backend = make_flashinfer(torch.zeros(1, 2, 1, 1, 2, 64, dtype=BF16), 2)
    monkeypatch.setattr(flashinfer_backend, "compile_modules", fails)
    monkeypatch.setattr(backend, "kv", SimpleNamespace(is_cuda=True))
    with pytest.raises(ModelNotSupported, match="Ninja build failed; nvcc has to be found"):
        backend.prepare()
    more = " in /a/long/path" * 1_000
    with pytest.raises(
        ModelNotSupported, match=r"Ninja build failed in .* \.\.\.; nvcc has"
    ) as told:
        backend.prepare()
    assert len(str(told.value)) < 1_000


def test_nothing_is_compiled_on_a_cpu(make_paged: MakePaged) -> None:
    make_paged(torch.zeros(1, 2, 1, 1, 2, 64, dtype=BF16), 2).prepare()


# -- the fake itself ------------------------------------------------------------------------------


def test_the_fake_finds_what_it_is_there_to_find(fake: Fake, make_flashinfer: MakePaged) -> None:
    """A keyword that does not exist, a plan left out, a plan overwritten."""
    case = Case(LENGTHS["decodes"], 2, **SHAPE)
    backend = make_flashinfer(case.kv, 8)
    with pytest.raises(TypeError, match="use_tensor_core"):
        fake.library.decode_wrapper(torch.zeros(1, dtype=torch.uint8), use_tensor_core=True)
    with pytest.raises(TypeError, match="max_tokens"):
        fake.bind("prefill.plan", None, *[None] * 4, 8, 2, 64, 2, max_tokens=3)
    graph, other = backend.make_graph_backend(4, 99), backend.make_graph_backend(4, 99)
    graph.plan(case.batch)
    graph.attend(case.q, 0)
    other.plan(case.batch)
    with pytest.raises(AssertionError, match="another plan lies in the int workspace"):
        graph.attend(case.q, 0)
    wrapper = FakeDecode(fake, (torch.zeros(1, dtype=torch.uint8),), {"backend": "fa2"})
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="the fast plan needs the module"):
        fake.library.fast_decode_plan(wrapper, one, one, one, 8, 2, 64, 2)
