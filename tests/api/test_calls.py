"""The forms of calls: what counts as several prompts, settings, types, what objects print."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from radixserve import (  # fmt: skip
    Completion,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    Runtime,
    SamplingParams,
)
from radixserve.api.settings import BeamSettings
from radixserve.config import EngineSettings
from radixserve.request import BeamParams
from tests.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("calls"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, num_pages=1024) as rt:
        yield rt


def test_several_prompts_are_any_iterable(rt: Runtime) -> None:
    wanted = [rt.generate(prompt, GREEDY).token_ids for prompt in ("ab", "cd")]
    several: list[Any] = [
        ["ab", "cd"],
        ("ab", "cd"),
        iter(["ab", "cd"]),
        (text for text in ("ab", "cd")),
        {"ab": 1, "cd": 2}.keys().__iter__(),
        np.array(["ab", "cd"]),
        np.array(["ab", "cd"], dtype=object),
        [np.str_("ab"), np.str_("cd")],
    ]
    for prompts in several:
        found = rt.generate(prompts, GREEDY)
        assert [out.token_ids for out in found] == wanted
    assert rt.generate(np.str_("ab"), GREEDY).token_ids == wanted[0]
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    assert len(rt.generate(ids, GREEDY)) == 2
    one = rt.generate(range(5, 8), GREEDY)
    assert isinstance(one, Completion)
    assert one.token_ids == rt.generate(ids[0], GREEDY).token_ids
    assert rt.generate(iter([5, 6, 7]), GREEDY).token_ids == one.token_ids


def test_no_prompts_are_no_answers(rt: Runtime) -> None:
    assert rt.generate([]) == rt.generate(()) == rt.generate(iter([])) == []
    assert rt.generate([], []) == []
    assert rt.beam_search([]) == []
    assert asyncio.run(rt.agenerate([])) == []


def test_what_is_no_prompt(rt: Runtime) -> None:
    for wrong in (3, None, {"role": "user", "content": "x"}, b"text", {"a", "b"}, np.array(3)):
        with pytest.raises(InvalidRequest, match="a prompt is text, a list of token ids"):
            rt.generate(wrong)  # type: ignore[call-overload]


def test_errors_of_several_name_the_index(rt: Runtime) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt 2: token id 999 is out of range"):
        rt.generate([[1], [2], [999]], GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: the prompt is empty"):
        rt.generate([[1], []], GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: stop_token_ids"):
        rt.generate(["a", "b"], [GREEDY, SamplingParams(stop_token_ids=[999])])
    with pytest.raises(InvalidRequest, match=r"^token id 999"):
        rt.generate([999], GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompt 0: "):
        rt.beam_search([[999]], 2)

    def fails(*_: object) -> object:
        raise ValueError("mine")

    each = [SamplingParams(n=2), SamplingParams(logits_processors=[fails]), GREEDY]
    with pytest.raises(RequestFailed, match=r"^prompt 1: .*ValueError\('mine'\)") as caught:
        rt.generate(["a", "b", "c"], each)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RequestFailed, match=r"^a function"):
        rt.generate("b", each[1])


def test_config_or_settings(folder: Path) -> None:
    config = EngineConfig(num_pages=64, page_size=4)
    for make in (lambda: Runtime(folder, config), lambda: Runtime(folder, config=config)):
        with make() as rt:
            assert rt.config is config
    with pytest.raises(InvalidRequest, match="give config or page_size, not both"):
        Runtime(folder, config, page_size=1)
    with pytest.raises(InvalidRequest, match="config must be an EngineConfig, got dict"):
        Runtime(folder, {"page_size": 1})  # type: ignore[arg-type]


def test_an_async_block_closes(folder: Path) -> None:
    async def main() -> Runtime:
        async with Runtime(folder, num_pages=64) as rt:
            assert len((await rt.agenerate("a", GREEDY, progress=True)).token_ids) == 4
        return rt

    rt = asyncio.run(main())
    with pytest.raises(EngineDead, match="closed"):
        rt.generate("a")
    assert repr(rt).endswith("closed)")


def test_a_bar_for_asyncio(
    rt: Runtime, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the counts of all its answers and of no others, though what was last reported is
    older."""
    core, status = rt._client.core, rt.status()
    monkeypatch.setattr(core, "status", lambda: status)
    rt.generate("c", GREEDY)
    asyncio.run(rt.agenerate(["a", "b"], GREEDY, progress=True))
    assert re.search(r"2/2, \d+ \+ 8 tok", capfd.readouterr().err.splitlines()[-1])
    asyncio.run(rt.agenerate(["a", "b"], GREEDY))
    assert capfd.readouterr().err == ""


def test_what_objects_print(rt: Runtime) -> None:
    assert repr(GREEDY) == "SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)"
    assert repr(EngineConfig(page_size=4)) == "EngineConfig(page_size=4)"
    assert repr(BeamParams()) == "BeamParams()"
    assert repr(rt).startswith("Runtime(LlamaForCausalLM, 0.1M parameters, cpu")
    assert "1,024 tokens of cache" in repr(rt)
    out = rt.generate("a" * 50, SamplingParams(max_tokens=300, logprobs=5, ignore_eos=True))
    assert len(repr(out)) < 250
    assert "300 tokens, length, prompt 50 = cached" in repr(out)


def test_typed_settings_are_the_fields() -> None:
    own = {field.name: hint for field, hint in _hints(EngineConfig)}
    assert get_type_hints(EngineSettings) == own, (
        "config.py: EngineSettings and EngineConfig differ"
    )
    known = {
        field.name: hint for one in (SamplingParams, BeamParams) for field, hint in _hints(one)
    }
    for name, hint in get_type_hints(BeamSettings).items():
        assert known[name] == hint


def _hints(record: type) -> list[Any]:
    hints = get_type_hints(record)
    return [(field, hints[field.name]) for field in fields(record)]


@pytest.mark.long
def test_mypy_knows_the_calls() -> None:
    """Lists, messages, async forms and settings by name; and it finds what is wrong."""
    pytest.importorskip("mypy")
    path = Path(__file__).with_name("typed_calls.py")
    flags = ["--strict", "--follow-imports=silent", "--warn-unused-ignores"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
