"""Several messages, messages without an answer, tools, template variables, begun answers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.text.chat_options import ToolsIgnored
from tests.checkpoints import make_checkpoint

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ (tool.function or tool).name }} {% endfor %}]"
    "{% endif %}"
    "{% for m in messages %}<{{ m.role[:1] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if enable_thinking %}!{% endif %}{% endif %}"
)
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}},
            "required": ["zone"],
        },
    },
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("messages"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module")
def shared_rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, num_pages=2048) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    assert shared_rt.tokenizer is not None
    monkeypatch.setattr(shared_rt.tokenizer._tokenizer, "chat_template", TEMPLATE)
    yield shared_rt
    shared_rt.check()


def test_a_role_of_ones_own_goes_where_the_template_takes_it(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"role": "critic", "content": "Is it so?"}
    assert rt.generate([message], GREEDY).usage.prompt_tokens > 0
    known = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}x"
    assert rt.tokenizer is not None
    monkeypatch.setattr(rt.tokenizer._tokenizer, "chat_template", known)
    asked = {"role": "user", "content": "A question"}
    refusal = r"messages\[1\] has the role 'critic': the model's chat template leaves its text out"
    with pytest.raises(InvalidRequest, match=refusal):
        rt.generate([asked, message], GREEDY)
    with pytest.raises(InvalidRequest, match=refusal):
        rt.chat().send([asked, message])
    for role in ("", "a b", "<|user|>", "x" * 65):
        with pytest.raises(InvalidRequest, match="a role must be 1 to 64 letters"):
            rt.generate([{**message, "role": role}], GREEDY)


def ids_of(rt: Runtime, text: str) -> list[int]:
    assert rt.tokenizer is not None
    return rt.tokenizer.encode_more(text)


def test_several_messages_and_added_ones(rt: Runtime, tmp_path: Path) -> None:
    with rt.chat("S", params=GREEDY) as chat:
        chat.add("one")
        chat.add([{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}])
        assert chat.history[1:] == [
            {"role": "user", "content": "one"},
            {"role": "tool", "content": "x"},
            {"role": "tool", "content": "y"},
        ]
        assert chat.tokens.tolist() == []
        other = chat.fork()[0]
        first = chat.send("two")
        wanted = ids_of(rt, "<s>S\n<u>one\n<t>x\n<t>y\n<u>two\n<a>")
        assert chat.tokens.tolist() == wanted + first.token_ids
        assert other.send("two").token_ids == first.token_ids
        second = chat.send([{"role": "tool", "content": "p"}, {"role": "tool", "content": "q"}])
        assert second.usage.cached_tokens == len(wanted) + 5  # all but the last token said
        tokens = chat.tokens.tolist()
        assert tokens[: len(wanted) + 6] == wanted + first.token_ids
        assert tokens[len(wanted) + 6 :] == ids_of(rt, "\n<t>p\n<t>q\n<a>") + second.token_ids
        chat.add("more")
        chat.save(tmp_path / "chat.json")
        with rt.load_chat(tmp_path / "chat.json", params=GREEDY) as loaded:
            assert loaded.history == chat.history
            assert loaded.tokens.tolist() == tokens
            assert loaded.send("?").token_ids == chat.send("?").token_ids
            assert loaded.tokens.tolist() == chat.tokens.tolist()
        assert [m["content"] for m in chat.undo()[:2]] == ["more", "?"]
        chat.add("again")
        assert chat.undo() == [{"role": "user", "content": "again"}]
        assert [m["role"] for m in chat.undo()] == ["tool", "tool", "assistant"]
        assert chat.tokens.tolist() == wanted + first.token_ids
        for wrong in ([], [3], [{"role": "system", "content": "x"}]):
            with pytest.raises(InvalidRequest):
                chat.add(wrong)  # type: ignore[arg-type]


def test_a_file_of_the_first_version(rt: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    with rt.chat(params=GREEDY) as chat:
        chat.send("one")
        chat.save(path)
        document = json.loads(path.read_text())
        for turn in document["turns"]:
            (turn["message"],) = turn.pop("messages")
        old = {k: v for k, v in document.items() if k not in ("added", "chat_template_kwargs")}
        path.write_text(json.dumps({**old, "version": 1}))
        with rt.load_chat(path) as loaded:
            assert loaded.history == chat.history
            assert loaded.tokens.tolist() == chat.tokens.tolist()


def test_a_begun_answer_is_continued(rt: Runtime) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    out = rt.generate(begun, GREEDY)
    text = "<u>hi\n<a>Sure, "
    assert out.usage.prompt_tokens == len(ids_of(rt, text))
    assert out.token_ids == rt.generate(ids_of(rt, text), GREEDY).token_ids
    parts = [begun[0], {"role": "assistant", "content": [{"type": "text", "text": "Sure, "}]}]
    assert rt.lookup(begun).cached_len == out.usage.prompt_tokens - 1
    empty = rt.generate([begun[0], {"role": "assistant", "content": " "}], GREEDY)
    assert empty.usage.prompt_tokens == len(ids_of(rt, "<u>hi\n<a>"))
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    with pytest.raises(InvalidRequest, match="must be text without tool calls"):
        rt.generate([begun[0], call], GREEDY)
    with rt.chat(params=GREEDY) as chat:
        answer = chat.send(begun)
        assert answer.token_ids == out.token_ids
        assert chat.history == [begun[0], {"role": "assistant", "content": f"Sure, {out.text}"}]
        assert chat.tokens.tolist() == ids_of(rt, text) + out.token_ids
        before = len(chat.tokens)
        assert chat.send("more").usage.cached_tokens == before - 1
        chat.undo()
        for chunk in chat.stream(["again", parts[1]]):
            if chunk.token_ids:
                break
        assert chat.history[-1]["content"].startswith("Sure, ")
        assert chat.tokens.tolist()[:before] != []


class TestTools:
    def test_they_reach_the_template(self, rt: Runtime) -> None:
        messages = [{"role": "user", "content": "hi"}]
        text = ids_of(rt, "[clock ]<u>hi\n<a>!")
        tools, kwargs = [CLOCK], {"enable_thinking": True}
        given: dict[str, Any] = {"tools": tools, "chat_template_kwargs": kwargs}
        out = rt.generate(messages, GREEDY, **given)
        assert out.usage.prompt_tokens == len(text)
        assert out.token_ids == rt.generate(text, GREEDY).token_ids
        (both, _) = rt.generate([messages, messages], GREEDY, **given)
        assert both.token_ids == out.token_ids
        *_, last = rt.stream(messages, GREEDY, **given)
        assert last.completion is not None
        assert last.completion.token_ids == out.token_ids
        assert rt.lookup(messages, **given).cached_len == len(text) - 1
        with rt.branch(messages, **given) as branch:
            assert branch.tokens.tolist() == text
        with rt.chat(params=GREEDY, **given) as chat:
            assert chat.send("hi").token_ids == out.token_ids
            assert chat.tokens.tolist() == text + out.token_ids

    def test_a_template_that_ignores_them_is_warned_about_once(self, rt: Runtime) -> None:
        plain = "{% for m in messages %}{{ m.content }}{% endfor %}?"
        with pytest.warns(ToolsIgnored, match="no place for tools"):
            rt.chat(template=plain, tools=[CLOCK])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rt.chat(template=plain, tools=[CLOCK])
            rt.chat(tools=[CLOCK])
            rt.generate([{"role": "user", "content": "hi"}], GREEDY, tools=[CLOCK])

    @pytest.mark.parametrize(
        ("tools", "message"),
        [
            ("clock", "tools must be a list"),
            ([3], r"tools\[0\] must be an object"),
            ([CLOCK, {"type": "web", "function": {}}], r"tools\[1\].type must be 'function'"),
            ([{"function": 3}], "function must be an object"),
            ([{"type": "function", "function": {}}], "name must be 1 to 128 letters"),
            ([{"name": "my tool!"}], "name must be 1 to 128 letters"),
            ([{"name": "a", "description": 3}], "description must be a string"),
            ([{"name": "a", "parameters": []}], "parameters must be a JSON schema"),
            ([{"name": "a", "parameters": {"type": "array"}}], "type must be 'object', got"),
            ([{"name": "a", "parameters": {"properties": 1}}], "properties must be an object"),
            ([{"name": "a", "parameters": {"properties": {"x": 1}}}], "x must be a JSON schema"),
            (
                [{"name": "a", "parameters": {"properties": {"y": {}}, "required": ["x"]}}],
                "required names what properties lacks: x",
            ),
            ([CLOCK, {"name": "clock"}], "'clock' is there twice"),
        ],
    )
    def test_wrong_ones(self, rt: Runtime, tools: Any, message: str) -> None:
        for use in (rt.chat, lambda **given: rt.generate("x", GREEDY, **given)):
            with pytest.raises(InvalidRequest, match=message):
                use(tools=tools)

    def test_wrong_settings(self, rt: Runtime) -> None:
        user = [{"role": "user", "content": "hi"}]
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"chat_template_kwargs": 3}, "chat_template_kwargs must be"),
            ({"chat_template_kwargs": {"tokenize": True}}, "cannot set tokenize"),
            ({"max_tokens": 5}, r"given in params: SamplingParams\(max_tokens=5\)"),
            ({"tool": []}, "unknown argument 'tool'; allowed: tools, chat_template_kwargs"),
        ]
        for given, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                rt.generate(user, GREEDY, **given)
        with pytest.raises(InvalidRequest, match="are for chat messages; the prompt is 'text'"):
            rt.generate("text", GREEDY, tools=[CLOCK])
