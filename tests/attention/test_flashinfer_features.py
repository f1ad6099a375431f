"""Windows and soft caps on FlashInfer: values, which kernels run, what is planned and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixserve.attention.base import PLAIN, AttentionFeatures, AttentionVariant
from radixserve.attention.cuda import flashinfer as flashinfer_backend
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.errors import ModelNotSupported
from radixserve_kernels.gpu.kernel_choice import KernelChoice
from tests.attention.cases import LENGTHS, SHARED, Case, SharedCase, run, store_and_attend
from tests.attention.conftest import MakePaged, Recording
from tests.attention.fake_flashinfer import Fake, Module
from tests.attention.test_features import LONG, TOLERANCE
from tests.attention.test_flashinfer_calls import compiled_modules
from tests.attention.test_paged_graph import Recorded, decodes, pool_of, store

WINDOW = AttentionFeatures(sliding_window=13)
CAP = AttentionFeatures(logits_soft_cap=0.7)
BOTH = AttentionFeatures(sliding_window=21, logits_soft_cap=3.0)
ALONE = {
    "a window of one": AttentionFeatures(sliding_window=1),
    "a window": WINDOW,
    "a wide window": AttentionFeatures(sliding_window=300),
    "a window wider than all": AttentionFeatures(sliding_window=5_000),
    "a cap": CAP,
    "a wide cap": AttentionFeatures(logits_soft_cap=50.0),
    "both": BOTH,
}
MODELS = {  # the features of layers in turn
    "mistral": [WINDOW],
    "gemma 2": [BOTH, CAP],
    "gemma 3": [WINDOW, PLAIN],
    "all there is": [PLAIN, WINDOW, CAP, BOTH, AttentionFeatures(sliding_window=2)],
}


def variants_of(layers: list[AttentionFeatures]) -> list[AttentionVariant]:
    return [one.variant for one in layers]


def check(out: torch.Tensor, case: Case, layer: int, features: AttentionFeatures) -> None:
    expected, _ = case.expected(layer, features=features)
    atol, rtol = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ALONE)
def test_ragged_batches(name: str, dtype: torch.dtype, make_flashinfer: MakePaged) -> None:
    features = ALONE[name]
    for lengths, page_size in (
        (LENGTHS["decodes"], 4),
        (LENGTHS["everything"], 2),
        (LENGTHS["long chunks"], 16),
        (LONG, 3),
    ):
        case = Case(lengths, page_size, 6, 2, 24, dtype=dtype)
        backend = make_flashinfer(case.kv.clone(), 6, variants=[features.variant])
        check(run(backend, case, features=features), case, 1, features)


@pytest.mark.parametrize("name", MODELS)
def test_layers_against_the_reference_backend(name: str, make_flashinfer: MakePaged) -> None:
    """Layers of one plan, step after step; each scale is a layer's own."""
    layers = MODELS[name]
    steps = [Case(LENGTHS[one], 2, 4, 2, 16) for one in ("everything", "decodes", "chunks")]
    most = max(len(case.kv[0, 0]) for case in steps)
    ours = make_flashinfer(torch.zeros(2, 2, most, 2, 2, 16), 4, variants=variants_of(layers))
    theirs = ReferenceBackend(torch.zeros(2, 2, most, 2, 2, 16), 4)
    for case in [*steps, *steps]:
        for backend in (ours, theirs):
            backend.kv[:, :, : len(case.kv[0, 0])] = case.kv
            backend.plan(case.batch)
        for number, features in enumerate([*layers, *layers]):
            arguments = case.q, case.k, case.v, number % 2, 0.1 + 0.3 * number, features
            torch.testing.assert_close(
                store_and_attend(ours, *arguments),
                store_and_attend(theirs, *arguments),
                atol=5e-6,
                rtol=3e-5,
            )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
def test_graphs(
    name: str, page_size: int, make_flashinfer: MakePaged, recording: Recording
) -> None:
    """One recording a layer, planned once for all of them before each replay; graphs of two sizes
    take turns in the same memory."""
    layers = MODELS[name]
    cases = [decodes(seed, page_size, shared=False) for seed in range(6)]
    backend = make_flashinfer(pool_of(cases), 4, variants=variants_of(layers))
    graphs = [backend.make_graph_backend(n, 9 * 64) for n in (9, 8)]
    held: dict[tuple[int, int], Recorded] = {}
    for number, case in enumerate([*cases, *cases[::-1]]):
        backend.kv.fill_(torch.nan)
        backend.kv[:, :, : case.kv.shape[2]] = case.kv
        backend.kv[:, :, 0].nan_to_num_(0.5)
        store(case, backend.kv, 1)
        graph = graphs[number % 2]
        graph.plan(case.batch)
        for at, features in enumerate(layers):
            if (number % 2, at) not in held:
                held[number % 2, at] = Recorded(graph, recording, 1, case, features)
            check(held[number % 2, at].replay(case), case, 1, features)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("name", SHARED)
def test_caps_of_shared_pages(name: str, fake: Fake, make_flashinfer: MakePaged) -> None:
    """Merging needs the log-sum of the capped scores; pages are not shared beside a window."""
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32)
    backend = make_flashinfer(case.kv.clone(), 8, variants=[PLAIN.variant, CAP.variant])
    for features in (CAP, PLAIN):
        check(run(backend, case, features=features), case, 1, features)
    assert "merge_state_in_place" in fake.calls
    fake.calls.clear()
    backend = make_flashinfer(case.kv.clone(), 8, variants=variants_of([WINDOW, CAP]))
    for features in (WINDOW, CAP):
        check(run(backend, case, features=features), case, 1, features)
    assert "merge_state_in_place" not in fake.calls


# -- which kernels, plans and modules -------------------------------------------------------------


def test_a_plan_a_variant(fake: Fake, make_flashinfer: MakePaged) -> None:
    """However many layers have it; a layer is run once."""
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    for layers, num_plans in ((MODELS["gemma 2"] * 5, 2), ([PLAIN] * 9, 1), ([WINDOW] * 4, 1)):
        backend = make_flashinfer(case.kv.clone(), 4, variants=variants_of(layers))
        backend.plan(case.batch)  # makes the wrappers
        fake.calls.clear()
        backend.plan(case.batch)
        assert len(fake.calls) == 2 * num_plans  # decodes and extends
        fake.calls.clear()
        for features in layers:
            store_and_attend(backend, case.q, case.k, case.v, 0, None, features)
        assert len(fake.calls) == 2 * len(layers)


def test_windows_run_in_the_kernel_that_skips_keys(
    fake: Fake, make_flashinfer: MakePaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is better for plain layers."""
    monkeypatch.setattr(flashinfer_backend, "wants_tensor_cores", lambda *_: False)
    case = Case(LENGTHS["decodes"], 2, 4, 2, 16)
    backend = make_flashinfer(case.kv, 4, variants=variants_of(MODELS["all there is"]))
    backend.plan(case.batch)
    graph = backend.make_graph_backend(4, 99)
    graph.plan(case.batch)
    assert fake.modules == {
        ("decode", False, False),
        ("decode", False, True),
        ("fa2", True, False),
        ("fa2", True, True),
    }


def test_fa3_runs_plain_layers_alone(fake: Fake, make_flashinfer: MakePaged) -> None:
    case = Case(LENGTHS["long chunks"], 2, 8, 2, 64, dtype=torch.bfloat16)
    layers = MODELS["all there is"]
    backend = make_flashinfer(case.kv, 8, variants=variants_of(layers))
    assert isinstance(backend, FlashInferBackend)
    backend.choice = KernelChoice(fa3=True)
    for features in layers:
        check(run(backend, case, features=features), case, 1, features)
    assert {one for one in fake.modules if one[0] == "fa3"} == {("fa3", False, False)}


@pytest.mark.parametrize("fa3", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "plain"])
def test_what_plans_load_is_compiled_ahead(
    name: str,
    fa3: bool,
    fake: Fake,
    make_flashinfer: MakePaged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else, but the decode kernel where no batch is better off there."""
    layers = MODELS.get(name, [PLAIN])
    variants = variants_of(layers)
    loaded: set[Module] = set()
    for tensor_cores in (False, True):
        monkeypatch.setattr(flashinfer_backend, "wants_tensor_cores", lambda *_, v=tensor_cores: v)
        for lengths in (LENGTHS["everything"], LENGTHS["long chunks"]):
            case = Case(lengths, 2, 8, 2, 16)
            backend = make_flashinfer(case.kv, 8, variants=variants)
            assert isinstance(backend, FlashInferBackend)
            backend.choice = KernelChoice(fa3=fa3)
            backend.plan(case.batch)
            backend.make_graph_backend(4, 99)
    loaded = set(fake.modules)
    compiled = compiled_modules(monkeypatch, variants, fa3=fa3)
    assert len(compiled) == len(set(compiled))
    assert set(compiled) == loaded


def test_what_is_passed(fake: Fake, make_flashinfer: MakePaged) -> None:
    """A window of W positions, the query's own the last, has W - 1 to the left."""
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    for features, window_left, cap in ((PLAIN, -1, 0.0), (BOTH, 20, 3.0), (CAP, -1, 0.7)):
        fake.arguments.clear()
        backend = make_flashinfer(case.kv, 4, variants=[features.variant])
        for _ in range(2):
            run(backend, case, features=features, scale=0.3)
        plans = [one for one in fake.arguments if "window_left" in one and "sm_scale" in one]
        assert len(plans) >= 4
        assert {one["window_left"] for one in plans} == {window_left}
        assert {one["logits_soft_cap"] for one in plans} == {cap}
        assert {one["sm_scale"] for one in plans} == {1.0}
        assert {one["q_scale"] for one in fake.arguments if "q_scale" in one} == {0.3}


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"attention_chunk_size": 8}, "attention_chunk_size"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"sinks": torch.zeros(4), "sliding_window": 3}, "sinks"),
    ],
)
def test_others_are_refused_by_name(
    fields: dict[str, Any], missing: str, make_flashinfer: MakePaged
) -> None:
    case, features = Case(LENGTHS["decodes"], 2, 4, 2, 16), AttentionFeatures(**fields)
    backend = make_flashinfer(case.kv, 4, variants=[features.variant])
    with pytest.raises(ModelNotSupported, match=f"the flashinfer backend .* has no {missing}$"):
        run(backend, case, features=features)


@pytest.mark.parametrize("layers", [[PLAIN], [WINDOW], [WINDOW, CAP]])
def test_a_layer_that_was_not_planned_for(
    layers: list[AttentionFeatures], make_flashinfer: MakePaged
) -> None:
    case = Case(LENGTHS["decodes"], 2, 4, 2, 16)
    backend = make_flashinfer(case.kv, 4, variants=variants_of(layers))
    backend.plan(case.batch)
    for features in (PLAIN, WINDOW, CAP, BOTH):
        if features in layers:
            store_and_attend(backend, case.q, case.k, case.v, 0, None, features)
            continue
        with pytest.raises(AssertionError, match=r"planned for .* not for AttentionVariant"):
            store_and_attend(backend, case.q, case.k, case.v, 0, None, features)
