"""Hits of chats with a hybrid model: states are kept where conversations divide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve.text.tokenizer import Tokenizer
from radixserve.text.turn_marks import turn_marks, turn_starts
from tests.checkpoints import make_model, make_tokenizer
from tests.models.causal_models import tiny_config

# In the style of Qwen 3.5: the generation prompt opens a thought, which the history leaves out.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MOST_REST = 16  # tokens computed again, at most


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join("".join(rng.choice(list("abcdefgh"), 4)) for _ in range(count))


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def shared(ids: Any, other: Any) -> int:
    size = min(len(ids), len(other))
    differs = np.asarray(ids[:size]) != np.asarray(other[:size])
    return int(differs.argmax()) if differs.any() else size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    torch.manual_seed(5)
    config = tiny_config("qwen3_5")
    config.text_config.max_position_embeddings = 16384
    tokenizer = make_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    config.text_config.vocab_size = len(tokenizer) + 8
    make_model(config.text_config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=40_000, num_states=400) as runtime:
        yield runtime
        runtime.check()


def ids_of(rt: Runtime, messages: list[dict[str, str]]) -> list[int]:
    assert rt.tokenizer is not None
    return rt.tokenizer.encode_chat(messages)


def test_each_turn_computes_what_is_new(rt: Runtime) -> None:
    """Eight turns of a client that sends its messages, without thoughts, each time."""
    rng = np.random.default_rng(1)
    messages = [said("system", words(rng, 60))]
    before: list[int] = []
    for turn in range(8):
        messages.append(said("user", words(rng, 10 + 25 * (turn % 3))))
        ids = ids_of(rt, messages)
        num_new = len(ids) - shared(ids, before)
        usage = rt.generate([messages], GREEDY)[0].usage
        assert num_new <= usage.computed_tokens < num_new + MOST_REST, turn
        assert usage.missing_state_tokens < MOST_REST
        messages.append(said("assistant", words(rng, 20)))
        before = ids


def test_tool_steps_go_on_from_the_last_question(rt: Runtime) -> None:
    """After several answers in a row the history drops the thoughts of all of them."""
    rng = np.random.default_rng(2)
    messages = [said("system", words(rng, 30)), said("user", words(rng, 30))]
    question = ids_of(rt, messages)
    for _ in range(3):
        rt.generate([messages], GREEDY)
        messages += [said("assistant", "<think>\n" + words(rng, 30)), said("user", words(rng, 5))]
    again = [*messages[:2], said("assistant", words(rng, 12)), said("user", words(rng, 12))]
    ids = ids_of(rt, again)
    usage = rt.generate([again], GREEDY)[0].usage
    assert usage.computed_tokens < len(ids) - shared(ids, question) + MOST_REST


@pytest.mark.parametrize("count", [6476, 200])
def test_a_shared_system_prompt_hits_at_the_second_sighting(rt: Runtime, count: int) -> None:
    rng = np.random.default_rng(3)
    head = "b" * count  # cut to a number of tokens
    system = said("system", head)
    while (extra := len(ids_of(rt, [system, said("user", "a")])) - count) > 40:
        system["content"] = system["content"][: -max(1, extra // 2)]
    first, second = ([system, said("user", words(rng, 40))] for _ in range(2))
    rt.generate([first], GREEDY)
    common = shared(ids_of(rt, first), ids_of(rt, second))
    usage = rt.generate([second], GREEDY)[0].usage
    assert usage.cached_tokens > common - MOST_REST > 0


def test_shared_tokens_without_text_hit_at_the_second_sighting(rt: Runtime) -> None:
    rng = np.random.default_rng(4)
    head, first, second, third = (rng.integers(3, 200, 200).tolist() for _ in range(4))
    rt.generate([[*head, *first]], GREEDY)
    usage = rt.generate([[*head, *second]], GREEDY)[0].usage
    assert usage.cached_tokens >= 192
    assert usage.missing_state_tokens == 200 - usage.cached_tokens
    assert rt.lookup([*head, *third]).cached_len == 200  # where the second one left the first


def test_marks_of_a_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    (start,) = tokenizer.encode_more("<|im_start|>")
    (end,) = tokenizer.encode_more("<|im_end|>")
    assert turn_marks(tokenizer, {end}) == {start}
    ids = np.asarray(tokenizer.encode_chat([said("system", "b"), said("user", "<|im_start|>")]))
    assert turn_starts(ids, {start}) == tuple(np.flatnonzero(ids == start)[1:])
    prompt = tokenizer.encode_rendered("<|im_start|>assistant\n<think>\n")
    assert turn_starts(ids, {start})[-1] == len(ids) - len(prompt)
    assert turn_starts(ids, ()) == ()
    assert turn_marks(None, ()) == frozenset()
    for path in folder.iterdir():
        if "token" in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0].content }}"  # a template without special tokens
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text(config["chat_template"])
    assert turn_marks(Tokenizer.load(tmp_path), ()) == frozenset()
