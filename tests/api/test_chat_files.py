"""Chats that are saved and loaded, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import (
    ChatSession,
    EngineDead,
    HistoryRewritten,
    InvalidRequest,
    RequestFailed,
    Runtime,
)
from radixserve.runner.cpu_runner import CpuModelRunner
from tests.api.test_chat import FREE, MOVES_SYSTEM, QUESTIONS, params_of
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_collections", "audit")


class TestErrors:
    def test_what_is_refused(self, demo: Runtime, tiny: Runtime) -> None:
        wrong: list[dict[str, Any]] = [
            {"system": 1},
            {"template": 1},
            {"template": "{{"},
            {"template": "{{ raise_exception('no') }}"},
            {"tools": "clock"},
            {"tools": ["clock"]},
            {"params": 1},
            {"params": {"max_tokens": 1}},
        ]
        for fields in wrong:
            with pytest.raises(InvalidRequest):
                demo.chat(**fields)
        with demo.chat(params=params_of(4)) as chat:
            for message in (1, None, {}, {"role": "user"}, {"role": "assistant", "content": None},
                            {"role": "system", "content": "x"}, [], "\ud800"):  # fmt: skip
                with pytest.raises(InvalidRequest):
                    chat.send(message)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="SamplingParams"):
                chat.send("x", 3)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="n must be"):
                chat.fork(0)
            assert chat.history == []
            assert chat.send("Hello!").usage.cached_tokens == 0
        with tiny.chat(params=FREE) as chat:
            chat.send("abc")
            before = chat.tokens.tolist(), chat.history
            with pytest.raises(InvalidRequest, match="tokens; at most"):
                chat.send("x" * 600)
            assert (chat.tokens.tolist(), chat.history) == before
            assert chat.send("d").usage.cached_tokens == len(before[0]) - 1

    def test_a_failed_step_leaves_the_chat_as_it_was(
        self, tiny: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with tiny.chat(params=FREE) as chat:
            chat.send("abc")
            before = chat.tokens.tolist(), chat.history

            def broken(*_: object) -> None:
                raise RuntimeError("no")

            with monkeypatch.context() as patch:
                patch.setattr(CpuModelRunner, "launch", broken)
                with pytest.raises(RequestFailed, match="no"):
                    chat.send("xyz")
                with pytest.raises(RequestFailed, match="no"):
                    list(chat.stream("xyz"))
            assert (chat.tokens.tolist(), chat.history) == before
            assert chat.send("d").usage.cached_tokens == len(before[0]) - 1

    def test_closed(self, tiny_folder: Path) -> None:
        rt = Runtime(str(tiny_folder), num_pages=512)
        chat, other = rt.chat(params=FREE), rt.chat(params=FREE)
        chat.send("abc")
        chat.close()
        chat.close()
        acts: list[Callable[[ChatSession], object]] = [
            lambda chat: chat.send("x"),
            lambda chat: chat.stream("x"),
            lambda chat: chat.undo(),
            lambda chat: chat.fork(),
            lambda chat: asyncio.run(chat.asend("x")),
        ]
        for act in acts:
            with pytest.raises(InvalidRequest, match="closed"):
                act(chat)
        assert len(chat.history) == 2
        assert repr(chat).startswith("ChatSession(turns=1, tokens=")
        rt.close()
        for act in acts:
            with pytest.raises(EngineDead, match="closed"):
                act(other)
        with pytest.raises(EngineDead, match="closed"):
            rt.chat()

    def test_a_model_without_tokenizer(self, tmp_path: Path) -> None:
        with (
            Runtime(str(make_checkpoint(tmp_path, "llama")), num_pages=64) as rt,
            pytest.raises(InvalidRequest, match="no tokenizer"),
        ):
            rt.chat()


class TestFiles:
    def test_save_and_load(self, demo: Runtime, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        with demo.chat("Be brief.", params=params_of(20)) as chat:
            for question in QUESTIONS[:3]:
                chat.send(question)
            chat.save(path)
            tokens, history = chat.tokens.tolist(), chat.history
            expected = chat.send("And now?")
        demo.flush_cache()
        with demo.load_chat(path, params=params_of(20)) as chat:
            assert (chat.tokens.tolist(), chat.history) == (tokens, history)
            out = chat.send("And now?")
            assert out.token_ids == expected.token_ids
            assert (out.usage.cached_tokens, out.usage.prompt_tokens) == (
                0,
                expected.usage.prompt_tokens,
            )
            chat.undo()
            chat.undo()
            assert chat.history == history[:-2]
            chat.save(path)
        with demo.load_chat(path) as chat:
            assert chat.history == history[:-2]

    def test_rewritten_turns_and_settings_survive(self, tiny: Runtime, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        tools = [{"name": "clock"}]
        with tiny.chat("Hm.", template=MOVES_SYSTEM, tools=tools, params=FREE) as chat:
            chat.send("abc")
            first = chat.tokens.tolist()
            with pytest.warns(HistoryRewritten):
                chat.send("xyz")
            chat.save(path)
            tokens = chat.tokens.tolist()
        with tiny.load_chat(path) as chat:
            assert chat.tokens.tolist() == tokens
            chat.undo()
            assert chat.tokens.tolist() == first
        assert json.loads(path.read_text())["tools"] == tools

    def test_an_empty_chat(self, demo: Runtime, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        with demo.chat("Hm.") as chat:
            chat.save(path)
        with demo.load_chat(path) as chat:
            assert chat.history == [{"role": "system", "content": "Hm."}]

    def test_wrong_files(self, demo: Runtime, tiny: Runtime, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        with tiny.chat(params=FREE) as chat:
            chat.send("abc")
            chat.save(path)
        with pytest.raises(InvalidRequest, match=r"another model: .*vocab_size 288, here"):
            demo.load_chat(path)
        good = json.loads(path.read_text())
        turn = good["turns"][0]
        wrong: list[Any] = [
            [],
            {},
            {**good, "version": 3},
            {**good, "kind": "shopping list"},
            {**good, "system": 1},
            {**good, "tools": ["a tool"]},
            {**good, "token_ids": [999]},
            {**good, "turns": [{**turn, "messages": [{"role": "user"}]}]},
            {**good, "turns": [{**turn, "answer": {"text": 1}}]},
            {**good, "turns": [{**turn, "tokens": 3}]},
        ]
        for document in wrong:
            path.write_text(json.dumps(document))
            with pytest.raises(InvalidRequest):
                tiny.load_chat(path)
        path.write_text("{")
        with pytest.raises(InvalidRequest, match="not a saved chat"):
            tiny.load_chat(path)
        with pytest.raises(FileNotFoundError):
            tiny.load_chat(tmp_path / "none")
        with demo.chat(params=params_of(4)) as chat:
            chat.send({"role": "tool", "content": "x", "extra": np.float32(1)})
            with pytest.raises(InvalidRequest, match="JSON"):
                chat.save(path)
