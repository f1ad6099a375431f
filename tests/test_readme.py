"""Every block of code of the README runs, and the Python of some pages of docs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code, with the heading above it."""

    heading: str
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    sections = [(section.partition("\n")[0], section) for section in text.split("\n## ")[1:]]
    return [
        Block(heading, language, code)
        for heading, section in sections
        for language, code in BLOCK.findall(section)
    ]


def python_blocks(path: str) -> dict[str, str]:
    """The Python of each chapter of a page."""
    text = (ROOT / path).read_text()
    return {block.heading: block.code for block in blocks(text) if block.language == "python"}


PRINTED = {
    "README.md": {
        "In Python": r"Lookup\(cached_len=.*\nUsage\(.*computed_tokens=",
        "The cache as a library": r"^0 60$",
    },
    "docs/python.md": {
        "Runtime": r"(length|stop) Usage\(.*\n.*0\.\d+$",
        "Chat": r"Usage\(.*computed_tokens=",
        "Branches": r"^\d The json module.* and",
        "Beam search": r"^(-\d\.\d{3} .*\n){4}Usage\(",
        "Decisions": r"^(True|False) \(.*\n(food|parcels) .*\n(calm|cross|furious) .*\n[0-2]\.",
        "Search": r"^prompt of 3 tokens 'The json module'\n20 thoughts.*├── ★ .*\n-\d+(\.0)? ",
    },
    "docs/advice.md": {"While serving": r"^\d+\.\d KiB of K/V are .* hits of 8\d %; .* 100 % new$"},
    "docs/store.md": {"Snapshots": r"^\d+ tokens written\n\d+ tokens loaded$"},
    "docs/branching.md": {
        "A branch is a position": r"^Usage\(.* cached_tokens=0.*\nUsage\(.*\n reads -.*\n eats -",
        "Search": r"thoughts: .*\n└── .*",
    },
    "docs/engine.md": {"A decode loop": r"^\[.*\] 0 cached\n\[.*\] 5 cached$"},
    "docs/prefixes.md": {"Put the static part first": r"^rules 537 195 73%\ntime 27 705 4%$"},
}
EXAMPLES = [
    pytest.param(code, PRINTED[path][heading], id=f"{path}: {heading}")
    for path in PRINTED
    for heading, code in python_blocks(path).items()
]


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_python_blocks(
    code: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "an example", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(printed, out.rstrip(), re.DOTALL), out


def test_every_block_of_the_readme_is_run() -> None:
    """By the test above, or one of those below."""
    kinds = [(block.heading, block.language) for block in blocks(README)]
    assert kinds == [
        ("Quick start", "bash"),
        ("In Python", "python"),
        ("As a server", "bash"),
        ("As a server", "py"),
        ("The cache as a library", "python"),
    ]


def block(heading: str, language: str) -> str:
    (code,) = (b.code for b in blocks(README) if (b.heading, b.language) == (heading, language))
    return code


def test_quick_start_is_two_commands() -> None:
    demo, tests = block("Quick start", "bash").strip().splitlines()
    assert demo.startswith("pip install")
    assert demo.endswith("radixserve demo")  # run by tests/test_cli.py
    assert tests.startswith("pip install")
    assert tests.endswith("pytest")


def test_server_blocks() -> None:
    """The curl line and OpenAI's client, against the command that stands above them."""
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    openai = pytest.importorskip("openai")
    from tests.server.served_process import Served

    start, _, curl = block("As a server", "bash").partition("\n")
    install, _, command = start.partition(" && ")
    assert install == 'pip install -e ".[serve]"'
    (arguments,) = re.findall(r"^radixserve serve (\w+) +#", command)
    server = Served(arguments, "--num-pages", "8192")
    address = f"localhost:{server.port}"
    try:
        server.wait_until_ready()
        done = subprocess.run(
            curl.replace("localhost:8000", address).replace("curl -s", "curl -sS --ipv4"),
            shell=True,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "NO_PROXY": "localhost"},
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["choices"][0]["message"]["content"]
        assert openai is not None
        printed = io.StringIO()
        code = block("As a server", "py").replace("localhost:8000", f"127.0.0.1:{server.port}")
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "the client", "exec"), {})
        num_prompt, num_cached = map(int, printed.getvalue().split())
        assert 0 < num_cached < num_prompt  # both questions begin alike
    finally:
        server.stop()


PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_each_page_says_for_whom_it_is(page: Path) -> None:
    title, blank, sentence = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert sentence.startswith("For ")


def test_links_lead_somewhere() -> None:
    """Those of the README and of docs/ that name a file here, headings included."""
    for page in (ROOT / "README.md", *PAGES):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page.name}: {target}"
            if heading:
                assert heading in _anchors(path.read_text()), f"{page.name}: {target}"


def test_the_files_that_the_architecture_page_names_exist() -> None:
    """By their path from radixserve/, from the kernels' package or from the root."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = re.findall(r"`((?:[\w.*]+/)+[\w.*]*)`", text)
    assert len(names) > 90
    kernels = ROOT / "kernels" / "radixserve_kernels"
    for name in names:
        path = name.replace("kernels/.../", "")
        folders = (ROOT / "radixserve", kernels, ROOT)
        assert any(list(folder.glob(path)) for folder in folders) or path in SUBFOLDERS, name


SUBFOLDERS = ("radix/", "hash/", "cuda/")  # which the page names by their last part


def _anchors(text: str) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}
