"""bench_gguf.py: its random file runs natively, without a tokenizer; its tables."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from radixserve import Runtime


@pytest.mark.parametrize(("kind", "head_kind"), [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0")])
def test_random_file(kind: str, head_kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    random_gguf = importlib.import_module("harness.random_gguf")
    command = importlib.import_module("bench_gguf")
    shape = random_gguf.Qwen35Shape(
        num_layers=4,
        hidden=256,
        intermediate=256,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        linear_heads=4,
        linear_dim=64,
        vocab=512,
    )
    file = tmp_path / "model.gguf"
    random_gguf.write_random_qwen35(file, shape, kind, head_kind)
    with Runtime(str(file), num_pages=64) as rt:
        assert rt.model.is_native
        assert rt.tokenizer is None
        assert shape.num_parameters < rt.model.num_parameters < 1.1 * shape.num_parameters
    args = argparse.Namespace(prompt=24, new=4, rounds=2, libraries=None, kind=kind)
    engines, lines = command.measure(args, file, shape)
    section = command.make_section(args, engines, lines)
    assert [row[0] for row in section.table.rows] == ["radixserve"]
    assert all(len(values) == args.rounds for values in engines["radixserve"].seconds.values())
