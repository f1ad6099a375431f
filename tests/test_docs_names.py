"""Names in the docs: a file, a class or an identifier in backquotes exists in the sources."""

from __future__ import annotations

import contextlib
import re
import shlex
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest

from radixserve.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent
DOCS = ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
SOURCES = ("radixserve", "kernels", "tools", "benchmarks", "tests", "examples")
HOMES = ("", "radixserve/", "kernels/radixserve_kernels/cpu/", "docs/", "benchmarks/gpu/")
# What docs name that is not ours: other engines' names, settings of other programs, files of users.
FOREIGN = set(
    """
    vLLM: CPUModelRunner EngineCoreRequest GPUModelRunner KVCacheManager OutputProcessor
    RequestOutputCollector RequestQueue StructuredOutputsParams allocate_slots enable_prefix_caching
    enable_qk_norm_rope_fusion fuse_rope_kvcache guided_ max_num_batched_tokens max_num_seqs
    mm_hash num_cached_tokens prefix_caching_hash_algo ref_cnt speculative_config
    SGLang: FutureMap GenerateReqInput GenerationBatchResult MHATokenToKVPool PrefillAdder ReqState
    SWATokenToKVPoolAllocator ScheduleBatch TokenizerManager init_forward_metadata pad_value
    prefix_indices
    TensorRT-LLM: KvCacheRetentionConfig copy_on_partial_reuse enable_block_reuse
    enable_partial_reuse free_gpu_memory_fraction max_batch_size max_num_tokens tokens_per_block
    nano-vllm: BlockManager kvcache_block_size
    models: ReformerModelWithLMHead SmolLM3 XmodPreTrainedModel causal_conv1d generation_config.json
    input_scale mamba_ssm
    set_default_language
    PEFT: adapter_config.json
    settings: ANTHROPIC_DEFAULT_HAIKU_MODEL RAY_AUTH_MODE TimeoutStopSec opencode.json
    proxy_read_timeout token_urlsafe
    outputs: DIR/kernel_choice.json results.json results.md
""".split()
)


def named(doc: str) -> set[str]:
    """The file names and identifiers in a page's inline code."""
    path = ROOT / doc if (ROOT / doc).exists() else ROOT / "docs" / doc
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = set[str]()
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]*\w\.(?:py|h|cpp|md|json)", code):
            names.add(code)
        else:
            names |= set(re.findall(r"[A-Za-z_]\w+", re.sub(r"\b\d[\d_]*", "", code)))
    return names


@cache
def words() -> frozenset[str]:
    """All words of the sources, without this file's own."""
    found = set[str]()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".js", ".html") and path != Path(__file__):
                found |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


def exists(name: str) -> bool:
    if "." in name:
        name = name.replace("/.../", "/radixserve_kernels/")
        return any((ROOT / f"{home}{name}").exists() for home in HOMES)
    is_identifier = "_" in name.strip("_") or re.search("[a-z][A-Z]", name)
    return not is_identifier or name in words()


@pytest.mark.parametrize("doc", DOCS)
def test_names_in_the_docs_exist(doc: str) -> None:
    missing = {name for name in named(doc) - FOREIGN if not exists(name)}
    assert not missing


def test_dotted_names_in_the_docs_are_modules_or_their_members() -> None:
    for doc in DOCS:
        path = ROOT / doc if (ROOT / doc).exists() else ROOT / "docs" / doc
        for dotted in re.findall(r"\bradixserve(?:\.(?!toml)[A-Za-z_]\w*)+", path.read_text()):
            parts = dotted.split(".")
            while parts and not (home := ROOT.joinpath(*parts)).is_dir():
                if home.with_suffix(".py").exists():
                    break
                parts.pop()
            rest = dotted.split(".")[len(parts) :]
            source = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
            is_there = not rest or re.search(rf"\b{rest[0]}\b", source.read_text())
            assert is_there, f"{doc} names {dotted}"


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return build_parser()


NAMES = "|".join(COMMANDS)
COMMAND = re.compile(rf"(?:^|`|&& |\| ) *radixserve ((?:{NAMES}) [^`\n#|&]*)", re.MULTILINE)


@pytest.mark.parametrize("doc", DOCS)
def test_flags_of_commands_in_the_docs_are_taken(
    doc: str, capsys: pytest.CaptureFixture[str], parser: ArgumentParser
) -> None:
    """A part of a command, or a comment behind it, may stand there as well."""
    path = ROOT / doc if (ROOT / doc).exists() else ROOT / "docs" / doc
    for command in COMMAND.findall(path.read_text().replace("\\\n", " ")):
        with contextlib.suppress(SystemExit):
            parser.parse_args(shlex.split(command))
        error = capsys.readouterr().err
        assert "unknown option" not in error, command
        assert "invalid" not in error, command


def test_foreign_names_are_in_the_docs() -> None:
    """A name that no page has any more goes from the list."""
    in_docs = set[str]().union(*map(named, DOCS))
    assert {name for name in FOREIGN if not name.endswith(":")} <= in_docs
