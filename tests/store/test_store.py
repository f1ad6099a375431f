"""Files of K/V: what is written is read back, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from radixserve.arrays import IntArray
from radixserve.runner.kv_layout import KVLayout
from radixserve.store import (
    BadRun,
    FolderStore,
    KVRun,
    NotAFile,
    StoredPrefixes,
    decode_run,
    encode_run,
    folder_store,
    run_file,
)
from radixserve.store.fingerprint import model_fingerprint
from radixserve.store.run_file import (
    CRC32,
    XXH3,
    decode_head,
    default_checksum,
)

LAYOUT = KVLayout(2, 2, 4, "float32", 4)
MODEL = "0" * 32


def kv_of(tokens: IntArray, start: int = 0) -> np.ndarray:
    """K/V that depends on each token and its position alone."""
    numbers = np.zeros((2, 2, len(tokens), 8), np.float32)
    numbers += (tokens * 1000.0 + np.arange(start, start + len(tokens)))[None, None, :, None]
    return numbers.view(np.uint8).reshape(2, 2, len(tokens), 32)


def random_tokens(seed: int, count: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, 50, count, np.int32)


@pytest.fixture
def prefixes(tmp_path: Path) -> StoredPrefixes:
    return StoredPrefixes(FolderStore(tmp_path / "kv", 1 << 30), MODEL, LAYOUT)


def write(prefixes: StoredPrefixes, tokens: IntArray, namespace: str = "") -> int:
    stored = prefixes.match(tokens, namespace)
    kv = kv_of(tokens[stored.length :], stored.length)
    runs = [kv[:, :, begin : begin + 512] for begin in range(0, kv.shape[2], 512)]
    return sum(run.num_tokens for run in prefixes.put(tokens, namespace, stored, runs))


def encoded(tokens: IntArray) -> bytes:
    return b"".join(encode_run(KVRun("a", 0, "", tokens, kv_of(tokens)), LAYOUT))


class TestRunFile:
    def test_what_is_written_is_read(self) -> None:
        tokens = random_tokens(0, 20)
        run = decode_run(encoded(tokens), LAYOUT)
        assert (run.namespace, run.start, run.parent) == ("a", 0, "")
        assert np.array_equal(run.tokens, tokens)
        assert np.array_equal(run.kv, kv_of(tokens))

    def test_any_damaged_byte_and_any_shorter_file_is_refused(self) -> None:
        data = encoded(random_tokens(1, 3))
        for index in range(len(data)):
            damaged = bytearray(data)
            damaged[index] ^= 1 << (index % 8)
            with pytest.raises(BadRun):
                decode_run(damaged, LAYOUT)
            with pytest.raises(BadRun):
                decode_run(data[:index], LAYOUT)
        with pytest.raises(BadRun):
            decode_run(data + b"\0", LAYOUT)

    def test_another_layout_and_a_later_version_are_refused(self) -> None:
        data = encoded(random_tokens(2, 3))
        with pytest.raises(BadRun, match="its K/V is"):
            decode_run(data, KVLayout(2, 2, 4, "bfloat16", 2))
        for other, match in (
            (data[:4] + (2).to_bytes(4, "little") + data[8:], "version"),
            (data[:8] + b"xxh9" + data[12:], "checksum is b'xxh9'"),
        ):
            with pytest.raises(BadRun, match=match):
                decode_run(other, LAYOUT)

    def test_either_checksum_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """New files have the fast one where its package is installed."""
        tokens = random_tokens(2, 30)
        run = KVRun("a", 0, "", tokens, kv_of(tokens))
        fast, plain = (b"".join(encode_run(run, LAYOUT, name)) for name in (XXH3, CRC32))
        assert default_checksum() == XXH3
        assert b"".join(encode_run(run, LAYOUT)) == fast != plain
        monkeypatch.setitem(sys.modules, "xxhash", None)
        assert default_checksum() == CRC32
        assert b"".join(encode_run(run, LAYOUT)) == plain
        assert np.array_equal(decode_run(plain, LAYOUT).kv, kv_of(tokens))
        with pytest.raises(BadRun, match="needs the package xxhash"):
            decode_run(fast, LAYOUT)

    def test_no_part_extends_over_a_multiple_of_the_bytes_of_a_write(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Of K/V in one piece or in several; the file is the same, in whatever calls the system
        takes it."""
        tokens = random_tokens(2, 30)
        kv = kv_of(np.concatenate([tokens, tokens]))[:, :, : len(tokens)]
        monkeypatch.setattr(folder_store, "_MAX_PARTS", 3)
        writev = os.writev
        monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:1000]]))
        for size in (64, 1000, 1 << 20):
            for module in (run_file, folder_store):
                monkeypatch.setattr(module, "WRITE_BYTES", size)
            parts = list(encode_run(KVRun("a", 0, "", tokens, kv), LAYOUT))
            assert b"".join(parts) == encoded(tokens)
            ends = np.cumsum([len(part) for part in parts])[1:-1]
            begins = np.array([len(part) for part in parts])[1:-1]
            assert ((ends - 1) // size == (ends - begins) // size).all()
            store = FolderStore(tmp_path / str(size), 1 << 20)
            assert store.put(A, parts) == len(encoded(tokens))
            assert store.get(A) == encoded(tokens)

    def test_kv_is_aligned_and_a_part_of_an_array_is_encoded_as_its_copy(self) -> None:
        tokens = random_tokens(2, 30)
        kv = kv_of(tokens)
        for begin, end in ((0, 30), (3, 20), (29, 30)):
            run = KVRun("a", begin, "", tokens[begin:end], kv[:, :, begin:end])
            copied = KVRun("a", begin, "", tokens[begin:end], kv[:, :, begin:end].copy())
            data = b"".join(encode_run(run, LAYOUT))
            assert data == b"".join(encode_run(copied, LAYOUT))
            assert decode_head(data).num_bytes % 64 == 0


A = f"{'0' * 32}/{'1' * 32}/{'2' * 32}-{0:08x}"
B = f"{'0' * 32}/{'3' * 32}/{'2' * 32}-{0:08x}"


def name_of(index: int) -> str:
    return f"{A[:-8]}{index:08x}"


class TestFolderStore:
    def test_put_get_has_drop_list(self, tmp_path: Path) -> None:
        store = FolderStore(tmp_path / "kv", 1000)
        assert store.get(A) is None
        assert store.put(A, [b"abc", b"def"]) == 6
        assert store.get(A) == b"abcdef"
        assert store.get(A, 2) == b"ab"
        for size in (1, 5, 6, 7, 100):  # too small, just large enough, larger
            memory = bytearray(size)
            assert store.get(A, into=memoryview(memory)) == b"abcdef"
            assert (memory[:6] == b"abcdef") == (size >= 6)
        assert store.has(A)
        assert [file.name for file in store.list()] == [A]
        assert store.num_bytes == 6
        store.put(B, [b"xyz"])
        store.drop_folder(A[:65])
        assert [file.name for file in store.list()] == [B]
        store.drop(B)
        store.drop(B)
        assert store.num_bytes == 0

    def test_files_and_folders_are_their_owners_alone(self, tmp_path: Path) -> None:
        """Whatever the umask."""
        before = os.umask(0)
        try:
            store = FolderStore(tmp_path / "kv", 1000)
            store.put(A, [b"abc"])
            store.put(B, [b"abc"])
            store.set_aside(B)
            model_fingerprint(None, "x", {}, tmp_path / "fingerprints")
            (tmp_path / "model.gguf").write_bytes(b"")
            model_fingerprint(tmp_path / "model.gguf", "x", {}, tmp_path / "kv")
        finally:
            os.umask(before)
        for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
            mode = path.stat().st_mode & 0o777
            assert mode == (0o700 if path.is_dir() else 0o600), path

    def test_a_temporary_file_takes_nobodys_place_and_follows_no_link(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its name cannot be guessed; should it be taken, the write fails."""
        store = FolderStore(tmp_path / "kv", 1000)
        store.put(A, [b"abc"])
        names = {path.name for path in (tmp_path / "kv").rglob("*") if path.is_file()}
        assert names == {f"{A[66:]}.kv"}
        monkeypatch.setattr(folder_store.secrets, "token_hex", lambda size: "ab" * size)
        victim = tmp_path / "victim"
        victim.write_text("theirs")
        (store.path_of(A).parent / f".{'ab' * 16}.tmp").symlink_to(victim)
        with pytest.raises(FileExistsError):
            store.put(A, [b"xyz"])
        assert victim.read_text() == "theirs"
        assert store.get(A) == b"abc"

    @pytest.mark.parametrize("kind", ["fifo", "link", "folder", "socket"])
    def test_only_regular_files_are_opened(self, tmp_path: Path, kind: str) -> None:
        """At once: a pipe that nobody writes to would be waited for. Neither is it listed, and it
        can be put aside and written again."""
        store = FolderStore(tmp_path / "kv", 1000)
        store.put(B, [b"abc"])
        path = store.path_of(A)
        path.parent.mkdir(parents=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(store.path_of(B))
        elif kind == "folder":
            (path / "full").mkdir(parents=True)
        else:
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
                server.bind(path.name)
        with pytest.raises(NotAFile):
            store.get(A)
        assert not store.has(A)
        store.touch(A)
        assert [file.name for file in store.list()] == [B]
        tokens = random_tokens(0, 30)
        prefixes = StoredPrefixes(store, MODEL, LAYOUT)
        assert prefixes.match(tokens).length == 0
        store.set_aside(A)
        assert store.put(A, [b"xyz"]) == 3
        assert store.get(A) == b"xyz"
        assert store.get(B) == b"abc"
        store.check()

    def test_a_link_to_a_folder_is_not_listed(self, tmp_path: Path) -> None:
        store = FolderStore(tmp_path / "kv", 1000)
        other = FolderStore(tmp_path / "other", 1000)
        other.put(A, [b"abc"])
        (tmp_path / "kv" / A[:32]).symlink_to(tmp_path / "other" / A[:32])
        assert not list(store.list())
        store.prune(0)
        assert other.has(A)

    def test_damaged_files_that_were_put_aside_stay_few_and_go_with_their_namespace(
        self, tmp_path: Path
    ) -> None:
        store = FolderStore(tmp_path, 1000)
        for index in range(20):
            store.put(name_of(index), [b"abc"])
            store.set_aside(name_of(index))
        store.put(B, [b"abc"])
        store.set_aside(B)
        assert len(list((tmp_path / "damaged").iterdir())) == 16
        assert store.num_bytes == 0
        store.check()
        store.drop_folder(A[:65])
        assert [path.name for path in (tmp_path / "damaged").iterdir()] == [
            f"{B.replace('/', '.')}.kv"
        ]
        store.drop_folder("")
        assert not list((tmp_path / "damaged").iterdir())

    def test_a_folder_that_vanished_is_made_anew(self, tmp_path: Path) -> None:
        store = FolderStore(tmp_path / "kv", 1000)
        for vanished in (tmp_path / "kv", tmp_path / "kv" / A[:32], tmp_path / "kv" / A[:65]):
            store.put(A, [bytes(10)])
            store.put(B, [bytes(10)])
            shutil.rmtree(vanished)
            assert store.get(A) is None
            assert store.put(A, [b"abc"]) == 3
            assert store.get(A) == b"abc"
            assert not list(tmp_path.rglob("*.tmp"))
            store.drop_folder("")
            store.check()
        store.put(A, [bytes(10)])
        shutil.rmtree(tmp_path / "kv")
        store.put(B, [bytes(7)])
        assert store.num_bytes == 7
        store.check()

    def test_files_of_a_store_that_was_closed_again_are_not_audited(self, tmp_path: Path) -> None:
        store = FolderStore(tmp_path / "kv", 100_000)
        store.put(A, [b"x" * 100])
        store.check()
        other = FolderStore(tmp_path / "kv", 100_000)
        other.put(B, [b"x" * 100])
        del other
        store.check()
        alone = FolderStore(tmp_path / "alone", 100_000)
        alone.put(A, [b"x" * 100])
        alone.set_aside(A)
        alone.num_bytes = 7
        with pytest.raises(AssertionError, match="7 bytes counted, 0 on disk"):
            alone.check()

    def test_two_stores_on_one_folder_keep_its_bound(self, tmp_path: Path) -> None:
        """Each sees what the other one writes when it has written a tenth of the bound."""
        stores = [FolderStore(tmp_path, 1000) for _ in range(2)]
        for index in range(400):
            stores[index % 2].put(name_of(index), [bytes(10)])
            on_disk = sum(file.num_bytes for file in stores[0].list())
            assert on_disk <= 1000 + 2 * 100 + 10
        for index in range(0, 400, 7):
            stores[0].drop(name_of(index))
            assert stores[1].get(name_of(index)) is None
        for store in stores:
            store.check()  # nothing is compared while another one uses the folder

    def test_a_clock_that_was_set_back_evicts_nothing_that_is_in_use(self, tmp_path: Path) -> None:
        """Files of the future count as unused for longest, until they are used again."""
        store = FolderStore(tmp_path, 100)
        future = time.time() + 1e6
        for index in range(8):
            store.put(name_of(index), [bytes(10)])
            os.utime(store.path_of(name_of(index)), (future + index, future + index))
        store.touch(name_of(3))
        for index in range(8, 14):
            store.put(name_of(index), [bytes(10)])
            assert store.has(name_of(index))
        left = {file.name for file in store.list()}
        assert {name_of(3), *map(name_of, range(8, 14))} <= left
        assert all(file.used_at <= time.time() + 60 for file in store.list())

    @pytest.mark.parametrize("num_files", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
    def test_very_many_files(self, tmp_path: Path, num_files: int) -> None:
        """Listed once to open the store and once to make room, not for each file written."""
        folder = tmp_path / A[:65]
        folder.mkdir(parents=True)
        for index in range(num_files):
            (folder / f"{A[66:-8]}{index:08x}.kv").write_bytes(b"abcdefgh")
        began = time.monotonic()
        store = FolderStore(tmp_path, 8 * num_files + 40)
        opened = time.monotonic()
        assert store.num_bytes == 8 * num_files
        for index in range(num_files, num_files + 10):
            store.put(name_of(index), [bytes(8)])
        print(f"opened in {opened - began:.2f} s, room in {time.monotonic() - opened:.2f} s")
        assert num_files // 10 - 1 <= store.num_dropped <= num_files // 10 + 10
        assert store.num_bytes <= 8 * num_files + 40
        store.check()

    def test_what_was_not_used_for_longest_goes(self, tmp_path: Path) -> None:
        store = FolderStore(tmp_path, 100)
        for index in range(10):
            store.put(name_of(index), [bytes(10)])
            os.utime(tmp_path / f"{name_of(index)}.kv", (index, index))
        os.utime(tmp_path / f"{name_of(0)}.kv", (50, 50))
        store.put(name_of(99), [bytes(10)])
        assert store.num_bytes <= 100
        assert store.num_dropped == 2
        left = {file.name for file in store.list()}
        assert left == {name_of(99), name_of(0), *(name_of(index) for index in range(3, 10))}
        assert FolderStore(tmp_path, 50).num_bytes == 40  # a smaller bound from now on

    def test_a_file_larger_than_the_store_is_refused_and_leaves_nothing(
        self, tmp_path: Path
    ) -> None:
        store = FolderStore(tmp_path, 100)
        with pytest.raises(OSError, match="more than the store may hold"):
            store.put(A, [bytes(101)])
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_temporary_files_of_killed_writers_go_when_they_are_old(self, tmp_path: Path) -> None:
        folder = tmp_path / A[:65]
        folder.mkdir(parents=True)
        for path, age in (
            (folder / f".{'ab' * 16}.tmp", 10_000),
            (folder / f".{'cd' * 16}.tmp", 1),
            (folder / ".1-1.tmp", 10_000),  # of an older version
            (folder / f".{'ef' * 16}.tmp", -10_000),  # the clock was set back
            (folder / "notes.kv", 10_000),
            (tmp_path / ".3-1.tmp", 10_000),
        ):
            path.write_bytes(b"a")
            os.utime(path, (time.time() - age,) * 2)
        store = FolderStore(tmp_path, 0)
        store.drop_temporary()
        store.prune(0)
        left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert left == {
            f".{'cd' * 16}.tmp",
            "notes.kv",
            ".3-1.tmp",
        }  # what is not the store's stays


class TestStoredPrefixes:
    def test_match_finds_the_longest_prefix_wherever_sequences_divide(
        self, prefixes: StoredPrefixes
    ) -> None:
        """Against a list of all sequences written, over random trees."""
        numbers, written = random.Random(0), [random_tokens(0, 0)]
        for _ in range(60):
            base = numbers.choice(written)
            cut = numbers.randint(0, len(base))
            tail = random_tokens(numbers.randrange(10**6), numbers.randint(1, 700))
            tokens = np.concatenate([base[:cut], tail])
            write(prefixes, tokens)
            written.append(tokens)
            query = np.concatenate([tokens[: numbers.randint(0, len(tokens))], tail[:3]])
            expected = max(_agreed(query, other) for other in written)
            stored = prefixes.match(query)
            assert stored.length == expected
            kv = [prefixes.read(run, query) for run in stored.runs]
            joined = np.concatenate([*kv, kv_of(query[:0])], axis=2)  # type: ignore[list-item]
            assert np.array_equal(joined, kv_of(query[:expected]))

    def test_a_namespace_sees_its_own_runs(self, prefixes: StoredPrefixes) -> None:
        tokens = random_tokens(3, 100)
        write(prefixes, tokens, "a")
        assert prefixes.match(tokens, "a").length == 100
        assert prefixes.match(tokens, "b").length == 0
        names = [file.name for file in prefixes.store.list()]
        assert not any(part == "a" for name in names for part in name.split("/"))
        prefixes.forget("b")
        assert prefixes.match(tokens, "a").length == 100
        prefixes.forget("a")
        assert prefixes.match(tokens, "a").length == 0

    def test_another_process_sees_what_this_one_wrote(
        self, prefixes: StoredPrefixes, tmp_path: Path
    ) -> None:
        tokens = random_tokens(4, 1500)
        write(prefixes, tokens)
        other = StoredPrefixes(FolderStore(tmp_path / "kv", 1 << 30), MODEL, LAYOUT)
        assert other.match(tokens).length == 1500
        assert write(other, np.concatenate([tokens, tokens])) == 1500
        assert prefixes.match(np.concatenate([tokens, tokens])).length == 3000
        another_model = StoredPrefixes(FolderStore(tmp_path / "kv", 1 << 30), "1" * 32, LAYOUT)
        assert another_model.match(tokens).length == 0

    def test_a_damaged_file_is_dropped_and_can_be_written_again(
        self, prefixes: StoredPrefixes
    ) -> None:
        tokens = random_tokens(5, 30)
        write(prefixes, tokens)
        (file,) = prefixes.store.list()
        data = bytearray(prefixes.store.path_of(file.name).read_bytes())
        data[-20] ^= 4
        prefixes.store.path_of(file.name).write_bytes(data)
        (run,) = prefixes.match(tokens).runs
        with pytest.raises(BadRun, match="was put aside"):
            prefixes.read(run, tokens)
        assert prefixes.match(tokens).length == 0
        assert write(prefixes, tokens) == 30
        assert prefixes.read(prefixes.match(tokens).runs[0], tokens) is not None

    def test_a_file_under_a_wrong_name_is_refused(self, prefixes: StoredPrefixes) -> None:
        first, second = random_tokens(6, 30), random_tokens(7, 30)
        write(prefixes, first)
        write(prefixes, second)
        (first_run,), (second_run,) = prefixes.match(first).runs, prefixes.match(second).runs
        folder = prefixes.store.folder
        os.replace(folder / f"{second_run.name}.kv", folder / f"{first_run.name}.kv")
        assert prefixes.read(first_run, first) is None
        assert prefixes.read(second_run, second) is None

    def test_a_run_that_another_process_wrote_again_is_read_if_its_tokens_agree(
        self, prefixes: StoredPrefixes, tmp_path: Path
    ) -> None:
        """It has the same name and another head."""
        tokens = random_tokens(6, 60)
        write(prefixes, tokens[:40])
        (run,) = prefixes.match(tokens).runs
        for count, is_read in ((60, True), (30, False)):
            other = StoredPrefixes(FolderStore(tmp_path / "kv", 1 << 30), MODEL, LAYOUT)
            other.store.drop(run.name)
            write(other, tokens[:count])
            kv = prefixes.read(run, tokens)
            assert (kv is not None) == is_read
            if kv is not None:
                assert np.array_equal(kv, kv_of(tokens[:40]))
            assert prefixes.match(tokens).length == count

    def test_paths_are_the_written_sequences_the_last_used_first(
        self, prefixes: StoredPrefixes
    ) -> None:
        first, second = random_tokens(8, 600), random_tokens(9, 30)
        write(prefixes, first, "a")
        write(prefixes, np.concatenate([first[:100], second]), "a")
        write(prefixes, second, "b")
        for name, namespace, tokens in (("old", "b", second), ("new", "a", first)):
            used = {"old": 1, "new": time.time() + 10}[name]
            for run in prefixes.match(tokens, namespace).runs:
                os.utime(prefixes.store.folder / f"{run.name}.kv", (used, used))
        paths = list(prefixes.paths())
        expected = [("a", first), ("a", np.concatenate([first[:100], second])), ("b", second)]
        assert [name for name, _ in paths] == [name for name, _ in expected]
        for (_, path), (_, tokens) in zip(paths, expected, strict=True):
            assert np.array_equal(path, tokens)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")

    def fingerprint(name: str, dtype: str = "float32") -> str:
        return model_fingerprint(tmp_path / name, name, {"dtype": dtype}, tmp_path)

    assert fingerprint("a") == fingerprint("b") == fingerprint("a")
    assert fingerprint("a") != fingerprint("a", "bfloat16")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"Weights")
    os.utime(tmp_path / "b" / "model.safetensors", (5, 5))
    assert fingerprint("a") != fingerprint("b")
    assert model_fingerprint(None, "x", {}, tmp_path) != model_fingerprint(None, "y", {}, tmp_path)


def test_a_fingerprint_that_cannot_be_kept_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    kept = tmp_path / "kept"
    (kept / "fingerprints.json").mkdir(parents=True)  # cannot be replaced by a file
    assert model_fingerprint(tmp_path / "model", "x", {}, kept)
    assert [path.name for path in kept.iterdir()] == ["fingerprints.json"]


WRITER = """
import sys
from pathlib import Path
from tests.store.test_store import LAYOUT, MODEL, random_tokens, write
from radixserve.store import FolderStore, StoredPrefixes
prefixes = StoredPrefixes(FolderStore(Path(sys.argv[1]), 1 << 30), MODEL, LAYOUT)
print("ready", flush=True)
for seed in range(10**9):
    write(prefixes, random_tokens(int(sys.argv[2]) * 1000 + seed, 900))
"""


def kill_writers(folder: Path, num_kills: int) -> None:
    """kill -9 of writing processes at random moments; every file that is left is right."""
    numbers = random.Random(1)
    for number in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(folder), str(number)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(numbers.random() * 0.05)
            writer.kill()
        store = FolderStore(folder, 1 << 30)
        for file in store.list():
            run = decode_run(store.get(file.name) or b"", LAYOUT)
            assert np.array_equal(run.kv, kv_of(run.tokens, run.start))
        store.drop_folder("")


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    kill_writers(tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_500_killed_writers_leave_whole_files(tmp_path: Path) -> None:
    kill_writers(tmp_path, 500)


def _agreed(first: IntArray, second: IntArray) -> int:
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size
