"""Runs the C++ compiler, once for all processes that want the same file.

A lock file makes the others wait. The compiler and what it wrote go when this process ends in
whatever way: a shell between the two sees the end of its input.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

logger = logging.getLogger("radixserve")

PATIENCE_S = 120  # without any progress of the compiler
NOTICE_S = 1.0
_POLL_S = 0.02
# $0 is the folder to remove, "$@" the compiler. Signal 0 of kill is the whole process group.
_GUARDED = """
exec 3<&0
(trap '' TERM; read -r _ <&3; kill -TERM 0; sleep 0.1; rm -rf -- "$0"; kill -KILL 0) &
guard=$!
"$@" 3<&- </dev/null
status=$?
kill -KILL $guard
exit $status
"""


class CompilerError(Exception):
    """The code cannot be compiled, for the reason in the message."""


def find_compiler() -> list[str]:
    """The compiler and what the user wants it to be called with. Raises CompilerError."""
    chosen = os.environ.get("CXX", "").strip()
    for name in (chosen,) if chosen else ("c++", "g++", "clang++"):
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise CompilerError(f"CXX={chosen} cannot be read: {error}") from error
        if shutil.which(words[0]):
            return words
    wanted = f"CXX={chosen}" if chosen else "c++, g++ and clang++"
    raise CompilerError(f"there is no C++ compiler: {wanted} not found")


@functools.cache
def compiler_version(*compiler: str) -> bytes:
    """The compiler's own version text, asked for once. Raises CompilerError if it does not run."""
    command = [*compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"the C++ compiler {compiler[0]} does not run: {error}") from error


def find_compiled(folder: Path, name: str) -> Path | None:
    """A file of that name whose content is what it was when it was made.

    Checked before it is loaded: a file that was cut off would end the process.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if path.name == _file_name(name, content):
            return path
        logger.warning("%s is damaged; the CPU kernels are compiled again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def compile_once(
    compiler: Sequence[str], sources: Sequence[Path], folder: Path, name: str, what: str
) -> Path:
    """The file `name`, made of `sources` at the same time, or by another process meanwhile.

    `compiler`: with its flags. `what`: for the notice after a second.
    Raises CompilerError, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{name}.lock", f"another process compiles {what}: waiting for it"):
        if (compiled := find_compiled(folder, name)) is not None:
            return compiled
        work = folder / f"{name}.tmp"
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        work.mkdir()
        try:
            made = work / "made.so"
            with _notice(f"compiling {what}, once, into {folder}"):
                _build(compiler, sources, work, made)
            path = folder / _file_name(name, made.read_bytes())
            os.replace(made, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return path


def _build(compiler: Sequence[str], sources: Sequence[Path], work: Path, made: Path) -> None:
    if len(sources) == 1:
        return _must_run([*compiler, str(sources[0]), "-o", str(made)], work)
    objects = [str(work / f"{source.stem}.o") for source in sources]
    commands = [
        [*compiler, "-c", str(source), "-o", target]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_must_run, commands, [work] * len(commands)))
    return _must_run([*compiler, *objects, "-o", str(made)], work)


def _must_run(command: Sequence[str], work: Path) -> None:
    status, messages = run_compiler(command, work)
    if status:
        failure = _complaint(messages)
        raise CompilerError(f"{command[0]} cannot compile the CPU kernels: {failure}")


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def run_compiler(command: Sequence[str], work: Path) -> tuple[int, str]:
    """(exit status, messages) of a compiler, whose temporary files are put into `work`."""
    with tempfile.TemporaryFile(dir=work) as messages:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, str(work), *command],
            stdin=subprocess.PIPE,
            stdout=messages,
            stderr=messages,
            env={**os.environ, "TMPDIR": str(work)},
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            _wait(process)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # the guard ends what is left
            process.wait()
        messages.seek(0)
        return process.returncode, messages.read().decode(errors="replace")


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Raises CompilerError where its processes have used no CPU time for PATIENCE_S."""
    used, since = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S if time.monotonic() - since < NOTICE_S else 10 * _POLL_S)
            return
        if time.monotonic() - since > min(1.0, PATIENCE_S):
            now = _cpu_ticks(process.pid)
            if now != used:
                used, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                raise CompilerError(
                    f"the C++ compiler has made no progress for {PATIENCE_S} seconds"
                )


def _cpu_ticks(group: int) -> int:
    """CPU time of a process group so far; 0 where the system does not say."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += sum(map(int, fields[11:15]))
    return total


@contextlib.contextmanager
def _locked(path: Path, notice: str) -> Iterator[None]:
    """Holds a lock file that no other process holds meanwhile; removed with the last holder."""
    try:
        import fcntl
    except ImportError:  # a system without such locks: processes may compile at the same time
        yield
        return
    while True:
        with path.open("ab") as file:
            with _notice(notice):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_current(file, path):
                continue  # the one before removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_current(file: IO[bytes], path: Path) -> bool:
    """Whether `path` is still the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _notice(text: str) -> Iterator[None]:
    """Logs a warning, which goes to stderr by default, if this takes more than a second."""
    timer = threading.Timer(NOTICE_S, logger.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _complaint(text: str) -> str:
    """The line of a compiler's messages that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])
