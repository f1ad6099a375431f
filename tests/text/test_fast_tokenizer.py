"""tokenizer.json read without transformers: its ids, text and chats, or None where it differs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from radixserve.api.runtime import DEMO
from radixserve.text import chat_template
from radixserve.text.fast_tokenizer import FastTokenizer, load_fast_tokenizer
from radixserve.text.tokenizer import Tokenizer as WrappedTokenizer
from tests.checkpoints import make_tokenizer
from tests.pacing import PATIENCE_S

# Older ones add an <unk> to Llama's vocabularies, fill in "reasoning_content" and let templates set
# attributes with an underscore.
as_transformers_does = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="compares with what transformers does from 5.23 on",
)
WORDS = [
    *("Hello", " world", "'LL", "don't", "123456", "  ", "\n\n", "\t", "é", "e\u0301", "日本語"),
    *("🙂", "\u200d", "<|user|>", "<|eos|>", "<|im_end|>", "<|", "x = 1;", " ", "Ünïcödé", "٣٤٥"),
]


def texts(seed: int = 0, count: int = 300) -> list[str]:
    rng = random.Random(seed)
    mixed = ["".join(rng.choices(WORDS, k=rng.randrange(12))) for _ in range(count)]
    points = ["".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(20)) for _ in range(count // 4)]
    return [*mixed, *points, Path(__file__).read_text()]


def write_config(folder: Path, model_type: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def make_qwen(folder: Path, model_type: str) -> None:
    """A tokenizer as Qwen's checkpoints have one, of a small vocabulary."""
    built = transformers.Qwen2Tokenizer().backend_tokenizer
    built.add_special_tokens([])
    fresh = Tokenizer(models.BPE())
    fresh.normalizer, fresh.pre_tokenizer = normalizers.NFC(), built.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    fresh.train_from_iterator([Path(__file__).read_text()], trainer)
    fresh.decoder = built.decoder
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fresh.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ends])
    fresh.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_config(folder, model_type)


def check_equal(ours: FastTokenizer | None, theirs: Any) -> None:
    assert ours is not None
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    for text in texts():
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
        for skip in (True, False):
            cut = ids[1:-1]
            assert ours.decode(cut, skip_special_tokens=skip) == theirs.decode(
                cut, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    messages = [{"role": "user", "content": "Hi  "}, {"role": "assistant", "content": None}]
    for prompt in (True, False):
        given = {"tokenize": False, "add_generation_prompt": prompt}
        expected = theirs.apply_chat_template(messages[:1], **given)
        rendered = WrappedTokenizer(ours).render_chat(messages[:1], add_generation_prompt=prompt)
        assert rendered == expected


class TestLoad:
    def test_the_demo(self) -> None:
        check_equal(load_fast_tokenizer(DEMO), AutoTokenizer.from_pretrained(DEMO))

    @pytest.mark.parametrize("model_type", ["llama", "qwen3"])
    def test_saved_by_transformers(self, tmp_path: Path, model_type: str) -> None:
        make_tokenizer(tmp_path)
        write_config(tmp_path, model_type)
        check_equal(load_fast_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path))

    @as_transformers_does
    @pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer"])
    def test_a_byte_level_one_of_llama(self, tmp_path: Path, name: str) -> None:
        make_tokenizer(tmp_path)
        write_config(tmp_path, "llama")
        edit(tmp_path, tokenizer_class=name)
        check_equal(load_fast_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path))

    @pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
    @pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
    def test_qwen(self, tmp_path: Path, model_type: str, name: str) -> None:
        make_qwen(tmp_path, model_type)
        edit(tmp_path, tokenizer_class=name)
        check_equal(load_fast_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path))

    def test_truncation_and_padding_of_the_file_are_off(self, tmp_path: Path) -> None:
        make_tokenizer(tmp_path)
        write_config(tmp_path, "llama")
        backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        backend.enable_truncation(5)
        backend.enable_padding(length=50)
        backend.save(str(tmp_path / "tokenizer.json"))
        ours = load_fast_tokenizer(tmp_path)
        assert ours is not None
        assert len(ours("twelve bytes")["input_ids"]) == 12

    def test_without_transformers(self) -> None:
        code = (
            "import sys; sys.modules['transformers'] = None\n"
            "from radixserve.api.runtime import DEMO\n"
            "from radixserve.text.tokenizer import Tokenizer\n"
            "print(Tokenizer.load(DEMO).render_chat([{'role': 'user', 'content': 'Hi'}]))\n"
        )
        subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True
        )


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def edit_backend(folder: Path, change: Callable[[Tokenizer], None]) -> None:
    path = str(folder / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    change(backend)
    backend.save(path)


def split_digits(backend: Tokenizer) -> None:
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


class TestLeftToTransformers:
    @pytest.mark.parametrize(
        "settings",
        [
            {"tokenizer_class": "GPT2Tokenizer"},
            {"tokenizer_class": None},
            {"auto_map": {"AutoTokenizer": ["a.b", None]}},
            {"eos_token": "<|not there|>"},
            {"extra_special_tokens": ["user"]},
            {"extra_special_tokens": {"image_token": "<image>"}},
            {"image_token": "<|user|>"},
            {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
            {"split_special_tokens": True},
            {"added_tokens_decoder": {"3": {"content": "x", "special": True}}},
        ],
        ids=str,
    )
    def test_settings(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        make_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        write_config(tmp_path, "llama")
        assert load_fast_tokenizer(tmp_path) is not None
        edit(tmp_path, **settings)
        assert load_fast_tokenizer(tmp_path) is None

    def test_files(self, tmp_path: Path) -> None:
        assert load_fast_tokenizer(tmp_path) is None
        make_tokenizer(tmp_path)
        for model_type in ("mistral", "gemma", "qwen2"):
            write_config(tmp_path, model_type)
            assert load_fast_tokenizer(tmp_path) is None
        (tmp_path / "tokenizer.json").write_text("{")
        assert load_fast_tokenizer(tmp_path) is None

    def test_another_split_than_that_of_qwen(self, tmp_path: Path) -> None:
        make_qwen(tmp_path, "qwen3")
        assert load_fast_tokenizer(tmp_path) is not None
        edit_backend(tmp_path, split_digits)
        assert load_fast_tokenizer(tmp_path) is None


TEMPLATE = """
{%- set ns = namespace(first=true) %}
{%- if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if ns.first %}{{ bos_token }}{% set ns.first = false %}{% endif %}
    {%- generation %}[{{ message.role }}] {{ message.content | trim }}{% endgeneration %}
    {{ message.reasoning_content }}|{{ message.thinking }}|{{ message | tojson }}
    {{- dict(a=1, b=message.role) | tojson(sort_keys=true) }}
{% endfor %}
{{ strftime_now('%Y') }}{{ documents }}{{ extra }}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"<": [1, 2.5, None]}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <brief> & 'kind' "},
    {"role": "skip", "content": "-"},
    {"role": "user", "content": [{"type": "text", "text": "x"}], "name": None},
    {"role": "assistant", "content": "ok", "thinking": "hm", "tool_calls": [{"id": 1}]},
    {"role": "assistant", "content": "ok", "reasoning": "so"},
]


class Text(str):
    """Not one of JSON's types."""


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("{% if message.role == 'critic' and message.content != 'x' %}{% endif %}", {"critic"}),
        ("{% if message['role'] in ['ipython', 'tool'] %}{% endif %}", {"ipython", "tool"}),
        ("{% set role = m.role %}{% if role is eq('thought') %}{% endif %}", {"thought"}),
        ("{% set n = {'user': 'U', 'model': 'M'} %}{{ n[m.role] }}", {"user", "model"}),
        ("{{ ms | selectattr('role', 'equalto', 'observation') | list }}", {"observation"}),
        ("<|im_start|>{{ message.role }}", set()),
        ("{% if %}", set()),
    ],
)
def test_the_roles_that_a_template_names(template: str, roles: set[str]) -> None:
    assert chat_template.named_roles(template) == roles


class TestTemplate:
    @as_transformers_does
    @pytest.mark.parametrize("tools", [None, TOOLS])
    @pytest.mark.parametrize("kind", [str, Text])
    def test_as_transformers_renders(self, tools: Any, kind: type[str]) -> None:
        messages = [{**one, "role": kind(one["role"])} for one in MESSAGES]
        variables = {"bos_token": "<s>", "extra": {"deep": [True, None]}}
        ours = chat_template.render(
            TEMPLATE, messages, tools=tools, add_generation_prompt=True, **variables
        )
        plain = [{k: v for k, v in one.items() if v is not None} for one in messages]
        theirs, _ = render_jinja_template(
            [plain], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True, **variables
        )
        assert ours == theirs[0]

    def test_a_last_message_that_goes_on(self) -> None:
        text = chat_template.render(
            "{% for m in messages %}{{ m.content }}<end>{% endfor %}",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}],
            continue_final_message=True,
        )
        assert text == "a<end>b "

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('no') }}",
            "{{ messages.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{% set ns = namespace(__init__=1) %}",
            "{% set ns = namespace() %}{% set ns._x = 1 %}",
            "{{ dict.__init__.__globals__ }}",
            "{% for %}",
        ],
    )
    def test_what_a_template_may_not_do(self, template: str) -> None:
        with pytest.raises(Exception, match=r".") as error:
            chat_template.render(template, MESSAGES)
        assert type(error.value).__module__.startswith("jinja2")

    def test_no_messages(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            chat_template.render("x", [])
