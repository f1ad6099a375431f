"""Chats: exact counts of computed tokens in every turn, whatever the template does to history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from radixserve import (
    Completion,
    HistoryRewritten,
    InvalidRequest,
    Runtime,
    SamplingParams,
)
from radixserve.text.chat_format import ChatFormat
from radixserve.text.chat_options import ChatOptions
from radixserve.text.conversations import Answer
from tests.checkpoints import BOS_ID, EOS_ID
from tests.pacing import PATIENCE_S, held, until

pytestmark = pytest.mark.usefixtures("quick_collections", "audit")

QUESTIONS = ["What does json.dumps do?", "And loads?", "Thanks.", "How do I copy a file?"]


def params_of(count: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **{"temperature": 0.0, **fields})


FREE = params_of(ignore_eos=True)

TURNS = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{CONTENT}{END}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{PROMPT}{% endif %}"
)


def template_of(
    content: str = "{{ message.content }}", end: str = "<|eos|>\n", prompt: str = ""
) -> str:
    return TURNS.replace("{CONTENT}", content).replace("{END}", end).replace("{PROMPT}", prompt)


PLAIN = template_of()
TRIMS = template_of("{{ message.content | trim }}")
MOVES_SYSTEM = (
    "{{ bos_token }}{% for message in messages if message.role != 'system' %}"
    "<|{{ message.role }}|>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KEEPS_LAST_TWO = "{% set messages = messages[-2:] %}" + PLAIN


def strips(separator: str, **more: str) -> str:
    """Only what comes behind `separator` stays of an answer."""
    answer = f"{{{{ message.content.split('{separator}')[-1] }}}}"
    content = (
        "{% if message.role == 'assistant' %}"
        + answer
        + "{% else %}{{ message.content }}{% endif %}"
    )
    return template_of(content, **more)


def encode(rt: Runtime, text: str) -> list[int]:
    assert rt.tokenizer is not None
    return rt.tokenizer.encode_more(text)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class TestPlainTemplates:
    def test_a_turn_computes_only_what_is_new(self, demo: Runtime) -> None:
        """The template's own end token ends an answer, or the length does: each once."""
        before: list[int] = []
        reasons = set()
        with demo.chat(system="You are a helpful assistant.", params=params_of(20)) as chat:
            for at, question in enumerate([*QUESTIONS, "Hello!"]):
                out = chat.send(question)
                reasons.add(out.finish_reason)
                tokens = chat.tokens.tolist()
                new = encode(demo, f"<|end|><|user|>{question}<|end|><|assistant|>")
                if at == 0:
                    system = "<|begin|><|system|>You are a helpful assistant.<|end|>"
                    new = encode(demo, f"{system}<|user|>{question}<|end|><|assistant|>")
                elif before[-1] == new[0]:  # the model has said <|end|> itself
                    new = new[1:]
                assert tokens == [*before, *new, *out.token_ids]
                # the last token of the answer before was sampled, but never read
                assert out.usage.computed_tokens == len(new) + (1 if before else 0)
                assert out.usage.cached_tokens == max(0, len(before) - 1)
                before = tokens
        assert reasons == {"stop", "length"}

    def test_the_first_prompt_is_that_of_generate(self, demo: Runtime) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        with demo.chat("Be brief.", params=params_of(5)) as chat:
            out = chat.send("Hi.")
            assert out.token_ids == demo.generate(messages, params_of(5)).token_ids
            assert demo.lookup(messages).cached_len == out.usage.prompt_tokens - 1
            assert chat.history == [*messages, {"role": "assistant", "content": out.text}]

    @pytest.mark.parametrize("page_size", [1, 2, 16])
    @pytest.mark.parametrize("template", [None, PLAIN, TRIMS], ids=["own", "plain", "trims"])
    def test_exact_at_every_page_size(
        self, tiny_folder: Path, page_size: int, template: str | None
    ) -> None:
        settings: dict[str, Any] = {"page_size": page_size, "num_pages": 4096 // page_size}
        with (
            Runtime(str(tiny_folder), **settings) as rt,
            rt.chat("Hm.", template=template, params=FREE) as chat,
        ):
            behind = "\n" if template is None else "<|eos|>\n"
            for at, question in enumerate(["abc", "d", "efg hij", "?"]):
                before = chat.tokens.tolist()
                out = chat.send(question)
                new = f"{behind}<|user|>{question}{behind}<|assistant|>"
                if at == 0:
                    new = f"<|bos|><|system|>Hm.{behind}<|user|>{question}{behind}<|assistant|>"
                    new = new.removeprefix("<|bos|>") if template is None else new
                assert chat.tokens.tolist() == [*before, *encode(rt, new), *out.token_ids]
                assert out.usage.computed_tokens == len(encode(rt, new)) + (1 if at else 0)
                rt.check()

    def test_an_answer_is_that_of_a_cold_run(self, tiny_folder: Path, tiny: Runtime) -> None:
        params = params_of(9, ignore_eos=True, logprobs=0)
        with tiny.chat(template=PLAIN, params=params) as chat:
            outs, prompts = [], []
            for question in ["abc", "d", "efg"]:
                outs.append(chat.send(question))
                prompts.append(chat.tokens.tolist()[: -len(outs[-1].token_ids)])
        with Runtime(str(tiny_folder), num_pages=1024, cache="off") as cold:
            for out, other in zip(outs, cold.generate(prompts, params), strict=True):
                assert out.token_ids == other.token_ids
                assert out.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    def test_special_tokens_that_were_generated_stay(self, tiny: Runtime) -> None:
        with tiny.chat(template=PLAIN, params=params_of(40, seed=3, temperature=1.5)) as chat:
            for _ in range(3):
                before = len(chat.tokens)
                out = chat.send("x", params_of(40, temperature=5.0, seed=1, ignore_eos=True))
                assert chat.tokens[-40:].tolist() == out.token_ids
                assert out.usage.cached_tokens == max(0, before - 1)

    def test_another_end_token_is_replaced_by_the_templates(self, tiny: Runtime) -> None:
        end = tiny.generate([BOS_ID], FREE).token_ids[3]
        params = params_of(stop_token_ids=[end], ignore_eos=True)
        with tiny.chat(template=PLAIN, params=params) as chat:
            out = chat.send("a", params_of(3, stop_token_ids=list(range(288)), ignore_eos=True))
            assert len(out.token_ids) == 1
            before = chat.tokens.tolist()
            second = chat.send("b", FREE)
            new = encode(tiny, "<|eos|>\n<|user|>b<|eos|>\n<|assistant|>")
            kept = before if before[-1] == EOS_ID else before[:-1]
            assert chat.tokens.tolist() == [*kept[:], *new, *second.token_ids]
            assert second.usage.computed_tokens == len(new)

    def test_a_stop_string_ends_what_was_said(self, demo: Runtime) -> None:
        with demo.chat(params=params_of(30)) as chat:
            free = chat.fork()[0].send(QUESTIONS[0])
            stop = free.text[9:14]
            out = chat.send(QUESTIONS[0], params_of(30, stop=stop))
            assert free.text.startswith(out.text + stop)
            start = len(chat.tokens) - len(out.token_ids)
            second = chat.send("And loads?")
            history = chat.tokens.tolist()[start:]
            said = encode(demo, "<|end|><|user|>And loads?<|end|><|assistant|>")
            assert demo.tokenizer is not None
            spoken = history[: -len(said) - len(second.token_ids)]
            assert demo.tokenizer.decode(spoken) == out.text
            kept = common(spoken, out.token_ids)
            cut = demo.tokenizer.decode(out.token_ids[: kept + 1])
            assert not out.text.startswith(cut)  # only what stands inside of a token is new
            assert kept > 0
            assert second.usage.cached_tokens == start + min(kept, len(out.token_ids) - 1)


class TestTemplatesThatRewrite:
    def test_moving_the_system_prompt(self, tiny: Runtime) -> None:
        with tiny.chat("Be kind.", template=MOVES_SYSTEM, params=FREE) as chat:
            first = chat.send("abc")
            head = encode(tiny, "<|bos|><|user|>")
            assert first.usage.computed_tokens == len(
                [*head, *encode(tiny, "Be kind.\nabc\n<|assistant|>")]
            )
            with pytest.warns(HistoryRewritten, match="the first 2 of 28 tokens are kept") as told:
                second = chat.send("xyz")
            assert len(told) == 1
            assert told[0].filename == __file__
            turn = [*head, *encode(tiny, "abc\n<|assistant|>"), *first.token_ids]
            last = encode(tiny, "\n<|user|>Be kind.\nxyz\n<|assistant|>")
            assert chat.tokens.tolist() == [*turn, *last, *second.token_ids]
            assert second.usage.cached_tokens == len(head)
            third = chat.send("uvw")  # told once
            # now the first turn stays as it is
            assert third.usage.cached_tokens == len(turn) + 2
            again = [*turn, *encode(tiny, "\n<|user|>xyz\n<|assistant|>"), *second.token_ids]
            last = encode(tiny, "\n<|user|>Be kind.\nuvw\n<|assistant|>")
            assert chat.tokens.tolist() == [*again, *last, *third.token_ids]

    def test_a_clock(self, tiny: Runtime, tmp_path: Path) -> None:
        """The date is that of the first turn, in forks and after a file as well."""
        template = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
        path = tmp_path / "chat.json"
        with tiny.chat(template=template, params=FREE) as chat:
            chats = [chat]
            first = chat.send("abc")
            date = encode(tiny, tiny.tokenizer.decode(chat.tokens[:6]))
            chats += chat.fork(1)
            chat.save(path)
            chats.append(tiny.load_chat(path, params=FREE))
            for one in chats:
                known = len(one.tokens)
                answer = one.send("xyz")
                assert answer.usage.cached_tokens >= known - 1
                assert one.tokens[: len(date)].tolist() == date
            assert first.usage.prompt_tokens == 6 + 3
            for one in chats[1:]:
                one.close()

    def test_a_file_that_has_no_date(self, tiny: Runtime, tmp_path: Path) -> None:
        template = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
        path = tmp_path / "chat.json"
        with tiny.chat(template=template, params=FREE) as chat:
            chat.send("abc")
            chat.save(path)
        document = json.loads(path.read_text())
        del document["began"]
        path.write_text(json.dumps(document))
        with tiny.load_chat(path, params=FREE) as chat:
            with pytest.warns(HistoryRewritten, match="writes the date or the time: ['\"]") as told:
                chat.send("xyz")
            assert "drops thinking" not in str(told[0].message)
            known = len(chat.tokens)
            assert chat.send("uvw").usage.cached_tokens >= known - 1

    @pytest.mark.parametrize("opening", ["", "<|system|>"], ids=["", "in the prompt"])
    def test_dropping_thinking(self, tiny_folder: Path, opening: str) -> None:
        """What is behind the separator stays with its own ids; `opening` begins the thinking."""
        separator, params = self.find_thinking(tiny_folder, opening)
        template = strips(separator, prompt=opening)
        with (
            Runtime(str(tiny_folder), num_pages=1024) as tiny,
            tiny.chat(template=template, params=params) as chat,
        ):
            first = chat.send("abc")
            assert separator in first.text
            at = first.token_ids.index(encode(tiny, separator)[0])
            head = encode(tiny, "<|bos|><|user|>abc<|eos|>\n<|assistant|>")
            kept = first.token_ids[at + 1 :]
            whole = [*head, *encode(tiny, opening), *first.token_ids]
            assert chat.tokens.tolist() == whole
            # the next turn will not have the thinking: nobody holds it any more
            assert tiny.cache_stats()["pages_closed"] == len(whole) - 1 - common(
                whole, [*head, *kept, EOS_ID]
            )
            with pytest.warns(HistoryRewritten) as told:
                second = chat.send("d")
            assert len(told) == 1
            new = encode(tiny, "<|eos|>\n<|user|>d<|eos|>\n<|assistant|>" + opening)
            prompt = [*head, *kept, *new]
            assert chat.tokens.tolist() == [*prompt, *second.token_ids]
            assert second.usage.prompt_tokens == len(prompt)
            assert second.usage.cached_tokens == common(prompt, whole)
            third = chat.send("e", FREE)
            stable = prompt[: len(prompt) - len(encode(tiny, opening))]
            assert third.usage.cached_tokens >= len(stable)
            assert chat.history[1]["content"] == first.text

    @staticmethod
    def find_thinking(tiny_folder: Path, opening: str) -> tuple[str, SamplingParams]:
        """A letter in the middle of the first answer, and how that was sampled."""
        with Runtime(str(tiny_folder), num_pages=1024) as rt:
            for seed in range(200):
                params = params_of(14, temperature=1.0, seed=seed, ignore_eos=True)
                with rt.chat(template=template_of(prompt=opening), params=params) as chat:
                    text = chat.send("abc").text
                for letter in text[3:9]:
                    if letter.isascii() and letter.isalnum() and text.count(letter) == 1:
                        return letter, params
        raise AssertionError("no answer will do")

    def test_dropping_words_inside_of_a_token(self, demo: Runtime) -> None:
        """What is kept begins inside a token: its text is tokenised, and nothing else is."""
        with demo.chat(params=params_of(30)) as chat:
            text = chat.send(QUESTIONS[0]).text
        separator = text[6:9]
        template = strips(separator, end="<|end|>")
        kept = text.split(separator)[-1]
        demo.flush_cache()
        with demo.chat(template=template, params=params_of(30)) as chat:
            assert chat.send(QUESTIONS[0]).text == text
            with pytest.warns(HistoryRewritten):
                second = chat.send("And loads?")
            prompt = chat.tokens.tolist()[: -len(second.token_ids)]
            wanted = (
                f"<|begin|><|user|>{QUESTIONS[0]}<|end|><|assistant|>{kept}<|end|>"
                "<|user|>And loads?<|end|><|assistant|>"
            )
            assert demo.tokenizer is not None
            assert demo.tokenizer.decode(prompt, keep_special=True) == wanted
            assert second.usage.cached_tokens + second.usage.computed_tokens == len(prompt)

    def test_forgetting_old_messages(self, tiny: Runtime) -> None:
        with tiny.chat(template=KEEPS_LAST_TWO, params=FREE) as chat:
            first = chat.send("abc")
            with pytest.warns(HistoryRewritten):
                second = chat.send("xyz")
            wanted = [BOS_ID, *encode(tiny, "<|assistant|>"), *first.token_ids]
            wanted += encode(tiny, "<|eos|>\n<|user|>xyz<|eos|>\n<|assistant|>")
            assert chat.tokens.tolist() == [*wanted, *second.token_ids]
            third = chat.send("uvw")
            assert third.usage.cached_tokens >= 2

    def test_forks_of_a_chat_that_was_told_are_quiet(self, tiny: Runtime) -> None:
        with tiny.chat("Be kind.", template=MOVES_SYSTEM, params=FREE) as chat:
            chat.send("abc")
            with pytest.warns(HistoryRewritten):
                chat.send("xyz")
            for other in chat.fork(2):
                other.send("more")


class TestHistory:
    def test_fork(self, demo: Runtime) -> None:
        with demo.chat("Be brief.", params=params_of(8)) as chat:
            chat.send(QUESTIONS[0])
            before = chat.tokens.tolist()
            one, two = chat.fork(2)
            outs = [one.send("Why?"), two.send("Why not?")]
            for out in outs:
                assert out.usage.cached_tokens >= len(before) - 1
            assert chat.tokens.tolist() == before
            assert [len(c.history) for c in (chat, one, two)] == [3, 5, 5]
            third = one.send("I see.")
            assert third.usage.cached_tokens == len(one.tokens) - len(third.token_ids) - (
                third.usage.computed_tokens
            )
            same = two.fork()[0]
            assert same.send("So?").token_ids == two.send("So?").token_ids

    def test_undo(self, demo: Runtime) -> None:
        with demo.chat("Be brief.", params=params_of(8)) as chat:
            with pytest.raises(InvalidRequest, match="nothing was said"):
                chat.undo()
            first = chat.send(QUESTIONS[0])
            tokens, history = chat.tokens.tolist(), chat.history
            second = chat.send("And loads?")
            taken = chat.undo()
            assert [m["content"] for m in taken] == ["And loads?", second.text]
            assert (chat.tokens.tolist(), chat.history) == (tokens, history)
            assert chat.send("And loads?").token_ids == second.token_ids
            chat.undo()
            chat.undo()
            assert chat.history == history[:1]
            again = chat.send(QUESTIONS[0])
            assert again.token_ids == first.token_ids
            assert again.usage.computed_tokens == 1

    def test_history_is_a_copy(self, demo: Runtime) -> None:
        message = {"role": "tool", "content": "42"}
        with demo.chat(params=params_of(4)) as chat:
            chat.send(message)
            message["content"] = "43"
            chat.history[0]["content"] = "44"
            assert chat.history[0] == {"role": "tool", "content": "42"}

    def test_tools_reach_the_template(self, tiny: Runtime) -> None:
        template = "{% if tools %}{{ tools[0].name }}\n{% endif %}" + PLAIN
        with tiny.chat(template=template, tools=[{"name": "clock"}], params=FREE) as chat:
            chat.send("abc")
            wanted = encode(tiny, "clock\n<|bos|><|user|>abc")
            assert chat.tokens.tolist()[: len(wanted)] == wanted
            assert chat.fork()[0].send("d").usage.cached_tokens == len(chat.tokens) - 1

    def test_stream_and_asyncio(self, demo: Runtime) -> None:
        async def main() -> list[Completion]:
            async with asyncio.timeout(PATIENCE_S):
                with demo.chat(params=params_of(8)) as one, demo.chat(params=params_of(8)) as two:
                    outs = [await one.asend(QUESTIONS[0])]
                    chunks = [chunk async for chunk in two.astream(QUESTIONS[0])]
                    assert chunks[-1].completion is not None
                    outs.append(chunks[-1].completion)
                    assert one.history == two.history
                    with held(demo):
                        task = asyncio.create_task(one.asend("Go on.", params_of(400)))
                        await until(lambda: demo.cache_stats()["running"] == 1)
                        with pytest.raises(InvalidRequest, match="answering"):
                            await one.asend("x")
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    assert one.history == two.history
                    outs += [await one.asend("Go on."), await two.asend("Go on.")]
                    return outs

        outs = asyncio.run(main())
        with demo.chat(params=params_of(8)) as chat:
            chunks = list(chat.stream(QUESTIONS[0]))
            assert "".join(chunk.text for chunk in chunks) == outs[0].text
            assert outs[0].token_ids == outs[1].token_ids == chat.tokens.tolist()[-8:]
            assert chat.send("Go on.").token_ids == outs[2].token_ids == outs[3].token_ids

    @pytest.mark.parametrize("is_interrupt", [False, True])
    def test_a_stream_that_is_left(self, demo: Runtime, is_interrupt: bool) -> None:
        with demo.chat(params=params_of(40)) as chat:
            stream = chat.stream(QUESTIONS[0])
            pieces = [next(stream) for _ in range(4)]
            with pytest.raises(InvalidRequest, match="answering"):
                chat.send("x")
            with pytest.raises(InvalidRequest, match="answering"):
                chat.undo()
            (other,) = chat.fork()
            assert other.history == []
            if is_interrupt:
                with pytest.raises(KeyboardInterrupt):
                    stream.throw(KeyboardInterrupt)
            else:
                stream.close()
            said = "".join(piece.text for piece in pieces)
            assert chat.history[-1] == {"role": "assistant", "content": said}
            ids = [token for piece in pieces for token in piece.token_ids]
            assert chat.tokens.tolist()[-len(ids) :] == ids
            before = len(chat.tokens)
            assert chat.send("Go on.").usage.cached_tokens in (before, before - 1)
            again = other.send(QUESTIONS[0])
            assert again.token_ids[: len(ids)] == ids
            assert again.usage.computed_tokens == 1


def test_users_may_say_what_looks_like_a_mark(demo: Runtime) -> None:
    assert demo.tokenizer is not None
    form = ChatFormat(demo.tokenizer, ChatOptions())
    messages = [
        {"role": "user", "content": "[answer 0] [answer 1]"},
        {"role": "assistant", "content": "[answerr 0]"},
        {"role": "user", "content": "[answer 1]"},
    ]
    said = tuple(encode(demo, "[answerr 0]"))
    ids, is_whole = form.tokenise(messages, {1: Answer("[answerr 0]", said, False)})
    assert ids == demo.tokenizer.encode_chat(messages)
    assert is_whole
