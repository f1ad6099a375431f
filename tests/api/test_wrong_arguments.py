"""Wrong arguments of Runtime's methods: each gets an InvalidRequest that says what is allowed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.grammar.compiler import CompiledGrammar, GrammarCompiler
from radixserve.structured_outputs import StructuredOutput

REGEX = {"regex": "[0-9]+"}
WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "structured must be a StructuredOutput or its fields": ("compile_grammar", (5,), {}),
    "unknown StructuredOutput name 'regexp'": ("compile_grammar", ({"regexp": "a"},), {}),
    "exactly one of json, regex": ("has_grammar", ({},), {}),
    "got list": ("has_grammar", ([REGEX],), {}),
    "extension must be an EngineExtension": ("extend", ("trace",), {}),
    "view must be a SnapshotView": ("cache_snapshot", ({"max_nodes": 3},), {}),
    "folder must be a path, got 5": ("save_cache", (5,), {}),
    "folder must be a path, got ''": ("load_cache", ("",), {}),
    "path must be a path, got None": ("load_chat", (None,), {}),
    "namespace must be a string, got 5": ("save_cache", ("folder",), {"namespace": 5}),
    "prompts must be a list of prompts, got one": (
        "save_cache",
        ("folder",),
        {"prompts": "a text"},
    ),
    "namespace must be a string, got 6": ("cache_tree", (10,), {"namespace": 6}),
    "keep_last must be >= 1, got 0": ("tokenize", ("a text",), {"keep_last": 0}),
    "keep_last must be an integer": ("tokenize", ("a text",), {"keep_last": "3"}),
    "truncation_side must be one of left, right": (
        "tokenize",
        ("a text",),
        {"truncation_side": "middle"},
    ),
    "text must be a string, got list": ("check_length", ([1, 2],), {}),
    "num_before must be an integer": ("check_length", ("a",), {"num_before": None}),
    "prompts must be a list of prompts, got one: 'a text'": ("submit", ("a text",), {}),
    "got one: list": ("submit", ([1, 2, 3],), {}),
    "a prompt is text, a list of token ids": ("submit", (5,), {}),
    "max_in_flight must be >= 1": ("submit", (["a"],), {"max_in_flight": 0}),
    "session must be a string": ("submit", (["a"],), {"session": 5}),
    "beams must be BeamParams": ("submit", (["a"],), {"beams": {"width": 2}}),
    "hints must be a list of Hints, got 5": ("apply_hints", (5,), {}),
    "a hint must be a Hint, got 'pin'": ("apply_hints", (["pin"],), {}),
}


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=400) as runtime:
        yield runtime


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(rt: Runtime, message: str) -> None:
    method, args, fields = WRONG[message]
    with pytest.raises(InvalidRequest) as caught:
        getattr(rt, method)(*args, **fields)
    assert message in str(caught.value)


def test_a_grammar_is_compiled_from_its_fields(rt: Runtime) -> None:
    assert not rt.has_grammar(REGEX)
    rt.compile_grammar(REGEX)
    assert rt.has_grammar(REGEX)


def test_paths_may_be_objects(rt: Runtime, tmp_path: Path) -> None:
    assert rt.save_cache(tmp_path / "empty") == 0
    assert rt.load_cache(tmp_path / "empty") == 0


def test_the_event_loop_compiles_no_grammar(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_grammar = GrammarCompiler.compile
    threads: list[int] = []  # of grammars that were new

    def note_thread(self: GrammarCompiler, structured: StructuredOutput) -> CompiledGrammar:
        if not self.has(structured):
            threads.append(threading.get_ident())
        return compile_grammar(self, structured)

    async def main() -> None:
        fields: dict[str, Any] = {"max_tokens": 4}
        await rt.agenerate("a", SamplingParams(structured={"regex": "a+"}, **fields))
        with rt.branch("a") as branch:
            await branch.agenerate(SamplingParams(structured={"regex": "b+"}, **fields))
        await rt.abeam_search("a", 2, structured={"regex": "[cd]+"}, **fields)

    monkeypatch.setattr(GrammarCompiler, "compile", note_thread)
    asyncio.run(main())
    assert len(threads) == 3
    assert threading.get_ident() not in threads
