"""What a study says of a trace: numbers, answers, documents, pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from radixserve.errors import InvalidRequest
from radixserve.replay import (
    CacheSpec,
    Serving,
    Study,
    build_paths,
    cross,
    study_document,
    study_trace,
)
from radixserve.replay.caches import GIB
from radixserve.replay.kv_bytes import kv_bytes_per_token
from radixserve.replay.plots import draw, draw_rates
from radixserve.replay.report import format_tokens
from radixserve.replay.study import best_fits, default_sizes, mean_gaps, next_gigabyte, page_losses
from tests.replay.traces import make_trace, synthetic_trace

SIZES = (1000, 4000, 16000)


@pytest.fixture(scope="module")
def study() -> Study:
    specs = cross(SIZES, ["lru", "fifo"], [1, 16], ["radix", "hash"], use_sessions=True)
    return study_trace(synthetic_trace(60), specs, [Serving(order="fcfs")])


def test_every_cache_is_between_nothing_and_the_bound(study: Study) -> None:
    assert len(study.direct) == len(study.scheduled) == 3 * 2 * 5
    for result in study.direct:
        assert 0 < result.hit_rate <= study.bound_rate(result.spec.cache_tokens) + 1e-12
    assert study.bound_rate(SIZES[0]) < study.bound_rate(SIZES[-1]) == study.ideal_rate


def test_the_next_gigabyte_is_the_slope_between_two_sizes(study: Study) -> None:
    gains = next_gigabyte(study, GIB // 1000)
    assert len(gains) == 2 * (2 * 5 + 1)
    hits = {r.spec: r.hit_tokens for r in study.direct}
    first = gains[0]
    assert (first["label"], first["from_tokens"], first["to_tokens"]) == ("lru", 1000, 4000)
    assert first["gib"] == pytest.approx(3.0, rel=1e-4)
    assert first["hit_tokens"] == hits[CacheSpec(4000)] - hits[CacheSpec(1000)]
    assert first["tokens_per_gib"] == pytest.approx(first["hit_tokens"] / 3.0, rel=1e-4)


def test_page_losses_are_against_page_size_1(study: Study) -> None:
    losses = {
        (row["label"], row["page_size"], row["cache_tokens"]): row["hit_tokens"]
        for row in page_losses(study)
    }
    assert len(losses) == 3 * (4 + 2)
    hits = {r.spec: r.hit_tokens for r in study.direct}
    wanted = hits[CacheSpec(16000)] - hits[CacheSpec(16000, page_size=16, index="hash")]
    assert losses["hash", 16, 16000] == wanted > 0
    assert losses["lru", 16, 16000] == 0


def test_the_best_is_the_one_with_most_hits(study: Study) -> None:
    for fit, size in zip(best_fits(study), SIZES, strict=True):
        rates = [r.hit_rate for r in study.direct if r.spec.cache_tokens == size]
        assert fit["hit_rate"] == max(rates)
        assert fit["gap"] == pytest.approx(study.bound_rate(size) - max(rates))
    gaps = [row["gap"] for row in mean_gaps(study)]
    assert gaps == sorted(gaps)
    assert len(gaps) == 10


def test_lengths_and_curves(study: Study) -> None:
    shares = study.reusable_shares()
    assert (len(shares), shares[0]) == (101, 0.0)
    assert (np.diff(shares) >= 0).all()
    sizes, rates = study.bound_curve(500, 20000)
    assert (np.diff(sizes) > 0).all()
    assert (np.diff(rates) >= 0).all()


def test_a_document_is_plain_json(study: Study) -> None:
    document = json.loads(json.dumps(study_document(study, 1024), allow_nan=False))
    assert document["requests"] == 60
    assert len(document["runs"]) == len(document["scheduled"]) == 30
    assert document["runs"][0]["label"] == "lru"
    assert document["scheduled"][0]["order"] == "fcfs"
    assert document["reuse_distance"]["reused_within"][-1] == pytest.approx(
        document["reusable_tokens"]
    )
    assert set(document["answers"]) == {
        "bytes_per_token",
        "next_gigabyte",
        "page_loss",
        "best",
        "mean_gap",
    }


def test_pictures(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "hits.png"
    draw([study, study], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequest, match="png"):
        draw([study], tmp_path / "hits.nonsense")


def test_pictures_can_be_read(study: Study) -> None:
    """Few ticks with short names, a label beside the end of each line, none above another."""
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    draw_rates(study, axes)
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    names = [tick.label1.get_text() for tick in ticks]
    assert 3 <= len(names) <= 9
    assert all(re.fullmatch(r"[125]0*k?", name) for name in names)
    assert not list(axes.xaxis.get_minorticklocs())
    extent = pytest.importorskip("matplotlib.text").Text.get_window_extent  # without the arrow
    boxes = [extent(text) for text in axes.texts]
    assert len(boxes) == len(study.by_kind()) + 2  # and the two bounds
    assert axes.get_legend() is None
    for number, box in enumerate(boxes):
        assert box.x0 > axes.bbox.x1
        assert not any(box.overlaps(other) for other in boxes[:number])
    bottom, top = axes.get_ylim()
    for line in axes.lines:  # none lies on the frame
        rates = line.get_ydata()
        assert bottom < min(rates)
        assert max(rates) < top


def test_sizes_that_suit_a_trace() -> None:
    trace = synthetic_trace(150)
    sizes = default_sizes(build_paths(trace), trace)
    assert len(sizes) == 5
    assert sizes[0] >= trace.longest
    assert sizes[-1] >= build_paths(trace).distinct_tokens
    tiny = make_trace([([1], ())])
    assert default_sizes(build_paths(tiny), tiny) == [1]


def test_tokens_are_written_short() -> None:
    assert [format_tokens(n) for n in (7, 250_000, 1.5e6, 2e9)] == ["7", "250k", "1.5M", "2G"]


# -- bytes a token --------------------------------------------------------------------------------

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
GEMMA4_31B = {  # 50 layers of 16 heads of 256, 10 of 4 heads of 512
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "num_kv_shared_layers": 0,
}
GEMMA4_E4B = {  # 24 layers store, of 2 heads: 20 of 256, 4 of 512
    **GEMMA4_31B,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
    "num_kv_shared_layers": 18,
}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({**LLAMA, "hidden_size": 4096, "torch_dtype": "bfloat16"}, 131_072),
        ({**LLAMA, "head_dim": 64, "dtype": "float32"}, 131_072),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}, 73_728),
        ({"text_config": {**LLAMA, "head_dim": 128}}, 131_072),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70_272),
        ({"text_config": GEMMA4_31B}, 901_120),
        ({"text_config": GEMMA4_E4B}, 57_344),
        ({**LLAMA, "head_dim": 128, "layer_types": ["attention", "mamba"] * 16}, 65_536),
        ({**LLAMA, "head_dim": 128, "full_attention_interval": 4}, 32_768),
        ({**LLAMA, "head_dim": 128, "full_attn_idxs": [2, 5]}, 8_192),
        ({**LLAMA, "head_dim": 128, "hybrid_override_pattern": "M-*M-*M-"}, 8_192),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, config: dict[str, object], size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path) == size
    assert kv_bytes_per_token(tmp_path / "config.json") == size
    if "head_dim" not in config and config.get("hidden_size") == 4096:
        assert kv_bytes_per_token(tmp_path, "bfloat16") == size
        assert kv_bytes_per_token(tmp_path, "int8") == size // 2 * 130 // 128


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        pytest.param("[" * 100_000, "JSON", id="deep"),
        ("[]", "object"),
        ("{}", "num_hidden_layers"),
        (json.dumps({**LLAMA, "hidden_size": 4096, "dtype": "int3"}), "dtype"),
        (json.dumps({"num_hidden_layers": 2, "num_attention_heads": 0}), "num_attention_heads"),
    ],
)
def test_a_config_that_does_not_say_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest, match=words):
        kv_bytes_per_token(tmp_path)
