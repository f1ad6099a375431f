"""Runtimes that tests of one file share, left as they were found."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixserve import HistoryRewritten, Runtime
from tests.checkpoints import EOS_ID, make_checkpoint


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Tests that collect garbage do not search what was there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=True, eos_ids=[EOS_ID, 10]
    )


@pytest.fixture(scope="module")
def shared_rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=4096) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime) -> Iterator[Runtime]:
    shared_rt.flush_cache()
    yield shared_rt
    check_let_go(shared_rt)


@pytest.fixture
def collected(rt: Runtime) -> Iterator[None]:  # noqa: ARG001
    """What a test dropped is gone before its runtime is checked."""
    yield
    gc.collect()


def check_let_go(rt: Runtime) -> None:
    rt.check()
    stats = rt.cache_stats()
    names = ("sessions", "pages_private", "pages_locked", "running", "waiting")
    assert {name: stats[name] for name in names} == dict.fromkeys(names, 0)


# -- chats ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=8192) as rt:
        yield rt


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[Runtime]:
    with Runtime(str(tiny_folder), num_pages=8192) as rt:
        yield rt


@pytest.fixture
def audit(demo: Runtime, tiny: Runtime) -> Iterator[None]:
    """Nothing is left over, and no chat rewrites its history unasked."""
    for rt in (demo, tiny):
        rt.flush_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error", HistoryRewritten)
        yield
    gc.collect()
    check_let_go(demo)
    check_let_go(tiny)
