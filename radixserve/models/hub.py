"""Models of the Hugging Face hub: a repository's files, resumable downloads, the local cache.

Files lie in the cache of huggingface_hub, where other programs find them. huggingface_hub drops a
file whose download was interrupted; here such a file is kept and continued. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BufferedRandom
from pathlib import Path
from typing import Any, NamedTuple

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX
from radixserve.models.names import CONFIG_FILE, HubName

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
DUPLICATES = ("consolidated*.safetensors", "*/*.safetensors")  # the same weights in other layouts
DEFAULT_VARIANT = "Q4_K_M"  # of a repository with several GGUF files
_PART = ".radixserve.incomplete"
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(-\d+-of-\d+)?$", re.IGNORECASE
)


class HubFile(NamedTuple):
    """A file of a repository."""

    name: str
    size: int  # bytes
    sha256: str | None  # None: of a small file, which git itself keeps


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a model. Made by `plan_download`."""

    name: HubName  # with the variant that was chosen
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes to download; of the cache only large files are considered."""
        folder = _repo_folder(self.name.repo)
        missing = self.num_bytes
        for file in self.files:
            if file.sha256 is not None:
                blob = folder / "blobs" / file.sha256
                missing -= _size(blob) or _size(blob.with_name(blob.name + _PART))
        return missing


class CachedModel(NamedTuple):
    """A model in the cache."""

    name: HubName
    num_bytes: int
    is_whole: bool  # else a download of the repository was interrupted


def plan_download(name: HubName) -> Download:
    """Ask the hub for the files of a model.

    Without a variant it is the repository's checkpoint, if it has one, else its GGUF file: the
    only one, or that of `DEFAULT_VARIANT`. Raises InvalidRequest.
    """
    from huggingface_hub import HfApi

    with _hub_errors(name):
        siblings = HfApi().model_info(name.repo, files_metadata=True).siblings or []
    files = []
    for sibling in siblings:
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        files.append(HubFile(sibling.rfilename, sibling.size or 0, sha256))
    checkpoint = [file for file in files if _is_checkpoint_file(file.name)]
    is_checkpoint = any(file.name.endswith(".safetensors") for file in checkpoint)
    if name.variant is None and is_checkpoint:
        return Download(name, tuple(checkpoint))
    by_name = {file.name: file for file in files}
    chosen = _choose_gguf(name, list(by_name))
    if chosen is None:
        raise InvalidRequest(f"{name.repo} has no safetensors files and no GGUF file")
    return Download(HubName(name.repo, name.variant or variant_of(chosen)), (by_name[chosen],))


def fetch(download: Download) -> Path:
    """Download what is missing and check it; returns the checkpoint's folder or the GGUF file.

    An interrupted download is resumed. Raises InvalidRequest, also if a file does not match the
    hub's hash.
    """
    repo, missing = download.name.repo, download.missing_bytes
    blobs = _repo_folder(repo) / "blobs"
    with _hub_errors(download.name):
        blobs.mkdir(parents=True, exist_ok=True)
        if missing > (free := shutil.disk_usage(blobs).free):
            raise InvalidRequest(f"{missing:,} bytes are missing, and {blobs} has {free:,} free")
        for file in download.files:
            if file.sha256 is not None and not (blobs / file.sha256).exists():
                _fetch_blob(repo, file, blobs / file.sha256)
        patterns = [file.name for file in download.files]
        folder = _fetch_small_files(repo, patterns)
    is_file = len(download.files) == 1 and download.files[0].name.endswith(SUFFIX)
    return folder / download.files[0].name if is_file else folder


def find_or_fetch(name: HubName) -> Path:
    """The checkpoint's folder or the GGUF file, from the cache if it is there, else from the hub.

    A checkpoint in the cache is updated if the hub can be reached. Raises InvalidRequest.
    """
    folder = _snapshot(name.repo)
    if folder is None:
        return fetch(plan_download(name))
    if name.variant is None and (folder / CONFIG_FILE).is_file():
        with _hub_errors(name):
            return _fetch_small_files(name.repo, CHECKPOINT_FILES)
    with contextlib.suppress(InvalidRequest):
        if (chosen := _choose_gguf(name, _file_names(folder))) is not None:
            return folder / chosen
    return fetch(plan_download(name))


def cached_models() -> list[CachedModel]:
    """All models in the cache, by name: checkpoints and GGUF files."""
    models = []
    for repo_folder in sorted(_cache().glob("models--*")):
        repo = "/".join(repo_folder.name.split("--")[1:])
        is_whole = not any((repo_folder / "blobs").glob("*.incomplete"))
        folder = _snapshot(repo)
        names = [] if folder is None else _file_names(folder)
        sizes = {name: _size(folder / name) for name in names} if folder is not None else {}
        checkpoint = [name for name in names if _is_checkpoint_file(name)]
        if any(name.endswith(".safetensors") for name in checkpoint):
            size = sum(sizes[name] for name in checkpoint)
            models.append(CachedModel(HubName(repo), size, is_whole))
        for name in names:
            if _is_gguf(name):
                models.append(CachedModel(HubName(repo, variant_of(name)), sizes[name], True))
        if not is_whole and not checkpoint:
            parts = sum(map(_size, (repo_folder / "blobs").glob("*.incomplete")))
            models.append(CachedModel(HubName(repo), parts, False))
    return models


def remove(name: HubName) -> int:
    """Delete a model from the cache: all of the repository, or the GGUF file of a variant.

    Returns the bytes that this frees. Raises InvalidRequest where it is not there.
    """
    folder, snapshot = _repo_folder(name.repo), _snapshot(name.repo)
    if not folder.is_dir():
        raise InvalidRequest(f"{name} is not in the cache; `radixserve list` shows what is")
    before = sum(_size(blob) for blob in (folder / "blobs").glob("*"))
    if name.variant is not None:
        chosen = None if snapshot is None else _choose_gguf(name, _file_names(snapshot))
        if snapshot is None or chosen is None:
            raise InvalidRequest(f"{name} is not in the cache; `radixserve list` shows what is")
        blob = (snapshot / chosen).resolve()
        for pointer in folder.glob(f"snapshots/*/{chosen}"):
            if pointer.resolve() == blob:
                pointer.unlink()
        blob.unlink(missing_ok=True)
        snapshot = _snapshot(name.repo)
    if name.variant is None or snapshot is None or not _file_names(snapshot):
        shutil.rmtree(folder)
        shutil.rmtree(_cache() / ".locks" / folder.name, ignore_errors=True)
        return before
    return before - sum(_size(blob) for blob in (folder / "blobs").glob("*"))


def variant_of(file_name: str) -> str:
    """How a GGUF file is quantised, as its name says: "Q4_K_M"; else its name without suffix."""
    stem = file_name.rpartition("/")[2].removesuffix(SUFFIX)
    match = _QUANT.search(stem)
    return stem if match is None else match[1].upper()


def _choose_gguf(name: HubName, names: Sequence[str]) -> str | None:
    """The file that a name means; None if there is no GGUF file. Raises InvalidRequest."""
    ggufs = sorted(filter(_is_gguf, names))
    if not ggufs:
        return None
    variants = sorted({variant_of(file) for file in ggufs})
    wanted = name.variant
    if wanted is None:
        wanted = DEFAULT_VARIANT if DEFAULT_VARIANT in variants else variants[0]
        if len(variants) > 1 and wanted != DEFAULT_VARIANT:
            raise InvalidRequest(
                f"{name.repo} has several GGUF files: add one of {', '.join(variants)}, as in "
                f"{name.repo}:{variants[0]}"
            )
    fitting = [
        file
        for file in ggufs
        if wanted.lower() in (variant_of(file).lower(), file.lower(), _stem(file).lower())
    ]
    if not fitting:
        raise InvalidRequest(f"{name.repo} has no {wanted}; it has {', '.join(variants)}")
    if any(re.search(r"-\d+-of-\d+$", _stem(file)) for file in fitting):
        raise InvalidRequest(f"{name.repo}:{wanted} is split into several files, which is not read")
    if len(fitting) > 1:
        raise InvalidRequest(
            f"{name.repo}:{wanted} may be each of {', '.join(fitting)}: name the file, as in "
            f"{name.repo}:{fitting[0]}"
        )
    return fitting[0]


def _stem(file_name: str) -> str:
    return file_name.rpartition("/")[2].removesuffix(SUFFIX)


def _is_gguf(name: str) -> bool:
    """Whether it is a language model: files named mmproj are the parts for images."""
    return name.endswith(SUFFIX) and not name.rpartition("/")[2].lower().startswith("mmproj")


def _is_checkpoint_file(name: str) -> bool:
    is_wanted = any(fnmatch(name, pattern) for pattern in CHECKPOINT_FILES)
    return is_wanted and not any(fnmatch(name, pattern) for pattern in DUPLICATES)


# -- downloads ------------------------------------------------------------------------------------


def _fetch_small_files(repo: str, patterns: Sequence[str]) -> Path:
    """The folder of the newest revision, with all files of these patterns."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Path(
        snapshot_download(
            repo,
            allow_patterns=list(patterns),
            ignore_patterns=list(DUPLICATES),
            tqdm_class=NoBar,
        )
    )


def _fetch_blob(repo: str, file: HubFile, blob: Path) -> None:
    """Download a large file to its place in the cache, or resume its download."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

    part = blob.with_name(blob.name + _PART)
    with _open_alone(part) as out:
        begin = out.seek(0, 2)
        if begin > file.size:
            begin = out.seek(0)
            out.truncate()
        http_get(
            hf_hub_url(repo, file.name),
            out,
            resume_size=begin,
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.name,
        )
        out.flush()
        out.seek(0)
        if hashlib.file_digest(out, "sha256").hexdigest() != file.sha256:
            part.unlink()
            raise InvalidRequest(
                f"{file.name} is not what the hub says (sha256): it was deleted; try again"
            )
        part.replace(blob)


@contextlib.contextmanager
def _open_alone(part: Path) -> Iterator[BufferedRandom]:
    """The file, opened to be continued; InvalidRequest while another process has it."""
    part.touch()
    with part.open("r+b") as out:
        try:
            import fcntl

            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # a system without such locks
            pass
        except OSError:
            raise InvalidRequest("another process is downloading this file") from None
        yield out


@contextlib.contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    """Whatever goes wrong with the hub as InvalidRequest, in one sentence."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequest(
            f"{name.repo!r} is not a folder, and the hub has no model of that name "
            f"or cannot be reached: {reason}"
        ) from error


# -- the cache ------------------------------------------------------------------------------------


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repo_folder(repo: str) -> Path:
    return _cache() / f"models--{repo.replace('/', '--')}"


def _snapshot(repo: str) -> Path | None:
    """The folder of the revision that was downloaded last; None where there is none."""
    folder = _repo_folder(repo)
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _file_names(folder: Path) -> list[str]:
    """Complete files below the folder, as relative paths."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def _size(path: Path) -> int:
    """Size in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
