"""A plugin of pytest that notes the tests that pass, or are skipped, in a file: see run.py.

RADIXSERVE_PASSED  the file, a test a line
RADIXSERVE_RESUME  1: the tests that it names are left out
RADIXSERVE_NO_KERNELS  1: the run fails if a test loads a compiled kernel
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixserve_kernels import cpu_library

FILE = Path(os.environ["RADIXSERVE_PASSED"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cpu_library.forget()  # files may ask for the library while they are imported
    if os.environ["RADIXSERVE_RESUME"] != "1" or not FILE.exists():
        return
    passed = set(FILE.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class Outcomes:
    def __init__(self) -> None:
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with FILE.open("a") as file:
                file.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ["RADIXSERVE_NO_KERNELS"] == "1" and cpu_library.loaded:
        print(f"\nkernels were loaded: {', '.join(map(str, cpu_library.loaded))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes())
