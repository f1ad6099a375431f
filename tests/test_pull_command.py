"""`radixserve pull`, `list` and `rm`, and models by their names on the hub, against a fake hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve.api.runtime import DEMO, Runtime
from radixserve.errors import InvalidRequest
from radixserve.models import hub as hub_module
from radixserve.models.hub import HubName, find_or_fetch, variant_of
from radixserve.models.names import read_hub_name
from radixserve.request import SamplingParams
from tests.fake_hub import FakeHub, serve_hub
from tests.test_cli import run

CHECKPOINT, GGUF, MANY = "someone/demo", "someone/demo-GGUF", "someone/many-GGUF"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    shutil.copytree(DEMO, root / CHECKPOINT)
    (root / CHECKPOINT / "consolidated.safetensors").write_bytes(bytes(20_000))
    (root / CHECKPOINT / "README.md").write_text("not needed")
    for repo, names in {
        GGUF: ["demo-Q8_0.gguf", "mmproj-demo-F16.gguf"],
        MANY: ["m-Q4_K_M.gguf", "m.q8_0.gguf", "m-BF16-00001-of-00002.gguf", "a-Q2_K.gguf"],
        "someone/two-GGUF": ["m-Q5_0.gguf", "m-Q8_0.gguf"],
        "someone/nothing": ["README.md"],
    }.items():
        (root / repo).mkdir(parents=True)
        for name in names:
            (root / repo / name).write_bytes(f"{repo}/{name}".encode() * 1_000)
    (root / MANY / "b-Q2_K.gguf").write_bytes(bytes(30_000))
    return root


@pytest.fixture
def hub(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub, and an empty cache."""
    from huggingface_hub import constants

    with serve_hub(repositories) as fake:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", fake.address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            fake.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield fake


def blobs(tmp_path: Path, repo: str) -> Path:
    return tmp_path / "cache" / f"models--{repo.replace('/', '--')}" / "blobs"


def test_a_checkpoint(hub: FakeHub) -> None:
    code, out, err = run("pull", CHECKPOINT)
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert first.startswith(f"{CHECKPOINT}: ")
    assert " files, " in first
    assert "missing" not in first
    folder = Path(second.removeprefix("complete and checked: "))
    names = {path.name for path in folder.iterdir()}
    assert "config.json" in names
    assert not {"README.md", "consolidated.safetensors"} & names
    assert third == f"radixserve chat {CHECKPOINT}"
    assert run("list")[1].split()[0] == CHECKPOINT
    before = hub.num_downloads
    assert before >= 1
    assert "are missing" in run("pull", CHECKPOINT)[1].splitlines()[0]  # small files alone
    assert hub.num_downloads == before
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with Runtime(CHECKPOINT, num_pages=256) as mine, Runtime("demo", num_pages=256) as other:
        answers = [runtime.generate("The json", params).token_ids for runtime in (mine, other)]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("hub")
def test_a_gguf_file_by_its_quantisation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("pull", f"{MANY}:q8_0")[0] == 0
    assert run("pull", MANY)[1].startswith(f"{MANY}:Q4_K_M: 1 file, ")
    path = find_or_fetch(HubName(MANY, "Q8_0"))
    assert path.name == "m.q8_0.gguf"
    monkeypatch.setattr(hub_module, "plan_download", None)  # what is in the cache asks nobody
    assert find_or_fetch(HubName(MANY, "m.q8_0.gguf")) == path
    assert find_or_fetch(HubName(MANY)).name == "m-Q4_K_M.gguf"
    lines = [line.split()[0] for line in run("list")[1].splitlines()]
    assert lines == [f"{MANY}:Q4_K_M", f"{MANY}:Q8_0"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/nobody", "the hub has no model of that name"),
        ("someone/nothing", "no safetensors files and no GGUF file"),
        ("someone/two-GGUF", "add one of Q5_0, Q8_0, as in someone/two-GGUF:Q5_0"),
        (f"{MANY}:Q3_K", "has no Q3_K; it has BF16, Q2_K, Q4_K_M, Q8_0"),
        (f"{MANY}:BF16", "is split into several files"),
        (f"{MANY}:Q2_K", "name the file, as in someone/many-GGUF:a-Q2_K.gguf"),
        ("a/b/c", "is not a name on the hub"),
        ("a b", "is not a name on the hub"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_errors_are_a_sentence(name: str, words: str) -> None:
    code, _, err = run("pull", name)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_a_download_goes_on_where_it_ended(hub: FakeHub, tmp_path: Path) -> None:
    data = (hub.root / GGUF / "demo-Q8_0.gguf").read_bytes()
    folder = blobs(tmp_path, GGUF)
    folder.mkdir(parents=True)
    (fact,) = (file for file in hub.files(GGUF) if file["name"] == "demo-Q8_0.gguf")
    (folder / f"{fact['sha256']}.radixserve.incomplete").write_bytes(data[:7_000])
    assert "incomplete: pull it again" in run("list")[1]
    code, out, _ = run("pull", GGUF)
    assert code == 0
    assert "are missing" in out.splitlines()[0]
    assert hub.ranges == ["bytes=7000-"]
    assert find_or_fetch(HubName(GGUF)).read_bytes() == data
    assert [path.name for path in folder.iterdir()] == [fact["sha256"]]
    assert "incomplete" not in run("list")[1]


def test_a_cut_connection_is_continued(hub: FakeHub) -> None:
    download = hub_module.plan_download(HubName(GGUF))
    hub.cut_after = 5_000
    data = (hub.root / GGUF / "demo-Q8_0.gguf").read_bytes()
    assert hub_module.fetch(download).read_bytes() == data
    assert hub.num_downloads == 2


def test_what_is_not_what_the_hub_says_is_deleted(hub: FakeHub, tmp_path: Path) -> None:
    (fact,) = (file for file in hub.files(GGUF) if file["name"] == "demo-Q8_0.gguf")
    folder = blobs(tmp_path, GGUF)
    folder.mkdir(parents=True)
    (folder / f"{fact['sha256']}.radixserve.incomplete").write_bytes(b"x" * 7_000)
    code, _, err = run("pull", GGUF)
    assert code == 2
    assert "demo-Q8_0.gguf is not what the hub says (sha256)" in err
    assert list(folder.iterdir()) == []
    assert run("pull", GGUF)[0] == 0


@pytest.mark.usefixtures("hub")
def test_rm(tmp_path: Path) -> None:
    for name in (f"{MANY}:Q8_0", f"{MANY}:Q4_K_M", GGUF):
        assert run("pull", name)[0] == 0
    assert run("rm", f"{MANY}:Q8_0")[1].endswith(" deleted\n")
    listed = run("list")[1]
    assert f"{MANY}:Q4_K_M" in listed
    assert "Q8_0" in listed  # of the other repository
    assert f"{MANY}:Q8_0" not in listed
    assert run("rm", f"{MANY}:Q4_K_M")[0] == 0
    assert not blobs(tmp_path, MANY).parent.exists()
    assert run("rm", GGUF)[0] == 0
    assert run("list")[1].startswith("no model of the hub is in the cache")
    code, _, err = run("rm", GGUF)
    assert code == 2
    assert "is not in the cache" in err


def test_a_hub_that_cannot_be_reached(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    assert run("pull", CHECKPOINT)[0] == 0
    folder = find_or_fetch(HubName(CHECKPOINT))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_or_fetch(HubName(CHECKPOINT)) == folder
    with pytest.raises(InvalidRequest, match="the hub has no model of that name or cannot be"):
        Runtime("someone/other:Q4_K_M", num_pages=8)
    del hub


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M"),
        ("sub/Model.iq4_nl.gguf", "IQ4_NL"),
        ("m-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("m-bf16.gguf", "BF16"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("m-Q8_0-00001-of-00003.gguf", "Q8_0"),
        ("qwen3.gguf", "qwen3"),
    ],
)
def test_variants(name: str, variant: str) -> None:
    assert variant_of(name) == variant


def test_names() -> None:
    cases: dict[str, Any] = {
        "owner/name": ("owner/name", None),
        "gpt2": ("gpt2", None),
        "owner/name:Q4_K_M": ("owner/name", "Q4_K_M"),
        "owner/name:sub/m.gguf": ("owner/name", "sub/m.gguf"),
    }
    assert {text: read_hub_name(text) for text in cases} == cases
    for text in ("/a", "./a", "a/b/c", "a b", "", "owner/name:", ":Q4"):
        assert read_hub_name(text) is None
