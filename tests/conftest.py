"""Settings of the whole test run. Imports nothing heavy: the cache is tested without torch."""

import atexit
import gc
import os
import platform
import sys

import pytest

from tests.pairwise import mark_long_runs

# The models here are so small that a second thread costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton's interpreter multiplies with numpy. On some processors (Zen 5) OpenBLAS has products in
# which a row's bits depend on the rows beside it; those for AVX have not.
if platform.machine() == "x86_64":
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
# Hundreds of processes import the package: each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; commands print as into a pipe

# Collections of all objects, of which ten thousand tests keep many, are a tenth of the time.
gc.set_threshold(2000, 20, 50)


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests to workers needs none of this."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    from hypothesis import HealthCheck, settings

    from radixserve.drafts import budget

    # How much is drafted depends on measured times, and many tests count steps: those that need
    # drafts ask for them.
    budget.DEFAULT_DRAFTS = 0

    # The same examples in every run, however slow the machine is; new ones are for long runs.
    settings.register_profile(
        "same",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_long_runs(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """No collection of garbage visits what was imported or collected: 0.3 s each time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's bindings report leaks


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu_ops runs its Triton kernels on CPU tensors, in Triton's interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    from radixserve_kernels import gpu_ops
    from tests.kernels.interpreter import interpret

    monkeypatch.setattr(gpu_ops, "cpu_launcher", interpret)
