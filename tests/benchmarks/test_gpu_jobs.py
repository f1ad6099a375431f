"""Jobs of the GPU benchmark: they stay apart, and end with all that they started."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE_BENCH = """
class Bench:
    def __init__(self, settings, tell):
        self.tell = tell
"""
FAKE_PART = """
import os, signal, subprocess, sys, time
from gpu.jobs import Skip

def run(bench, group):
    bench.tell("row", group)
    if group == "raises":
        raise ValueError("what is wrong")
    if group == "skips":
        raise Skip("no room")
    if group == "leaves":
        os._exit(7)
    if group == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if group == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        bench.tell("child", child.pid)
        time.sleep(600)
    print("said by", group)
"""
KILLED = """
import sys, time
from pathlib import Path
from gpu.jobs import Job, Settings

job = Job("gpu.part_fake", "hangs", Settings(), Path(sys.argv[1]), 250.0)
while "child" not in dict(job.told()):
    time.sleep(0.02)
print(dict(job.told())["child"], flush=True)
job.finish()
"""


@pytest.fixture(autouse=True)
def fake_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that does everything wrong, and a bench that needs no torch."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "bench.py").write_text(FAKE_BENCH)
    (tmp_path / "gpu" / "part_fake.py").write_text(FAKE_PART)
    folders = [str(folder) for folder in (tmp_path, ROOT / "benchmarks", ROOT, ROOT / "kernels")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def start(folder: Path, group: str, limit_s: float = 250.0) -> Any:
    jobs = importlib.import_module("gpu.jobs")
    return jobs.Job("gpu.part_fake", group, jobs.Settings(), folder, limit_s)


def test_jobs_cannot_hurt_each_other(tmp_path: Path) -> None:
    wrong = {
        "raises": ("trouble", "ValueError: what is wrong"),
        "skips": ("skipped", "no room"),
        "leaves": ("trouble", "exit code 7, see the log"),
        "dies": ("trouble", "killed by SIGKILL, see the log"),
        "works": (),
    }
    jobs = [start(tmp_path, group) for group in wrong]
    for job in jobs:
        job.finish()
        more = [wrong[job.group]] if wrong[job.group] else []
        assert job.told() == [("row", job.group), *more]
    log = (tmp_path / "log.txt").read_text()
    assert "said by works" in log
    assert "ValueError: what is wrong" in log


def child_of(job: Any) -> int:
    while "child" not in (told := dict(job.told())):
        time.sleep(0.02)
    return int(told["child"])


def test_jobs_that_hang_end_with_all_they_started(tmp_path: Path) -> None:
    job = start(tmp_path, "hangs")
    child = child_of(job)
    job.deadline = time.monotonic()  # its time is over
    job.finish()
    assert job.told()[-1] == ("trouble", "no end before its time limit or the deadline")
    wait_for_end(child)


def test_no_job_outlives_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        run.kill()
    wait_for_end(child)


def test_groups_after_the_deadline_are_not_begun(tmp_path: Path) -> None:
    session, report = importlib.import_module("gpu.session"), importlib.import_module("gpu.report")
    settings = importlib.import_module("gpu.jobs").Settings()
    run = report.Report({}, tmp_path)
    part = session.run_part("choose", settings, run, until=time.monotonic())
    assert part.troubles == [
        f"{one}: not begun before the deadline" for one in ("decode", "extend")
    ]


def wait_for_end(pid: int) -> None:
    for _ in range(1200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    pytest.fail("what the job started goes on")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
