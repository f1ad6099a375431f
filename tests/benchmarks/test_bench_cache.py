"""The cache benchmark runs and prints what it says; no test asserts a time."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest

from tests.benchmarks.conftest import Run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, run: Run) -> tuple[dict[str, Any], str]:
    """One quick run of everything: its JSON document and its Markdown."""
    folder = tmp_path_factory.mktemp("results")
    result = run("bench_cache.py", "--quick", "--json", "--save", str(folder))
    assert result.returncode == 0, result.stderr
    assert (folder / "cache-cpu.json").read_text() == result.stdout
    document: dict[str, Any] = json.loads(result.stdout)
    return document, (folder / "cache-cpu.md").read_text()


def test_bench_cache_measures_every_case(saved: tuple[dict[str, Any], str]) -> None:
    document, markdown = saved
    assert "## I  a scheduling pass" in markdown
    figures = document["figures"]
    assert {figure["key"][0] for figure in figures} == {"r", *"ABCDEFGHIJ"}
    assert all(0 < figure["low"] <= figure["value"] <= figure["high"] for figure in figures)
    assert all(figure["ratio"] > 0 for figure in figures if figure["unit"] == "us")
    radix = {figure["key"] for figure in figures if figure["contender"] == "radix"}
    assert {"A.lookup", "A.take", "C.request", "E.page.1000", "F.chat.token"} <= radix
    assert {"cpu", "cores", "memory_gib", "python", "numpy", "share_of_a_core"} <= set(
        document["settings"]
    )
    contenders = {figure["contender"] for figure in figures}
    assert {"hash-16", "hash-256"} <= contenders
    is_absent = any(line.startswith("sglang: skipped") for line in document["absent"])
    assert ("sglang-rust" in contenders) != is_absent


def test_bench_cache_names_its_cases(run: Run) -> None:
    result = run("bench_cache.py", "--only", "A,Z")
    assert result.returncode == 2
    assert "no such case: Z" in result.stderr


def test_stubs_never_hide_what_is_installed() -> None:
    stub_packages = importlib.import_module("cache.stub_packages").stub_packages
    before = list(sys.meta_path)
    with stub_packages("json", "absent_package"):
        absent = importlib.import_module("absent_package.part")
        assert importlib.import_module("json").loads("1") == 1

        class Child(absent.Anything, key=1):  # type: ignore[call-arg,misc,name-defined]
            pass

        assert absent.decorator(Child) is Child
    assert sys.meta_path == before
    for name in ("absent_package", "absent_package.part"):
        del sys.modules[name]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_package")
