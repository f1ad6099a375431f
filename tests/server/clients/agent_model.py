"""A checkpoint that works like an agent: its answers follow a script, one for each tool result.

Its chat template writes how many results of tools came before each answer as a special token, and
each such token begins a chain of tokens that is the answer. Pieces of answers are tokens of their
own, which the tokenizer makes of no text: only the ids that the server remembers meet the cache.
It may take pictures, as LLaVA: 16 tokens each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import make_config
from tests.images.vision_checkpoints import write_processor_files

_START, _END = "<|im_start|>", "<|im_end|>"
_IMAGE = "<image>"
_TITLE = "<|no tools|>"
_PIECE = 6  # characters of a piece of an answer, at least
TEMPLATE = """\
{%- macro said(content) %}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content %}{% if part.type == 'image' %}{{ '<image>' }}
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- endmacro %}
{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}{{ '<|im_start|>system\n' }}
{%- if has_system %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\n# Tools' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n<tool_call>\n{"name": N, "arguments": A}\n</tool_call>' }}{% endif %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set count = namespace(results=0) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant<|step' ~ count.results ~ '|>' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- set count.results = count.results + 1 %}
{{- '<|im_start|>user\n<tool_response>\n' + said(message.content) }}
{{- '\n</tool_response><|im_end|>\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + said(message.content) + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}
{%- if tools %}{{ '<|step' ~ count.results ~ '|>' }}{% else %}{{ '<|no tools|>' }}{% endif %}
{%- endif %}"""


def tool_call(name: str, **arguments: Any) -> str:
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def make_agent(
    folder: Path,
    answers: Sequence[str],
    *,
    without_tools: str = '{"title": "A short title"}',
    takes_pictures: bool = False,
    positions: int = 262_144,
) -> Path:
    """Write a checkpoint whose answer after n tool results is the n-th; the last one stays.

    A prompt without tools is answered with `without_tools`.
    """
    used: set[str] = set()
    marks = [f"<|step{number}|>" for number in range(len(answers) + 8)]
    scripts = [*answers, *[answers[-1]] * 8]
    chains = [[mark, *_pieces(text, used)] for mark, text in zip(marks, scripts, strict=True)]
    chains.append([_TITLE, *_pieces(without_tools, used)])
    tokenizer = _tokenizer(sorted(used), [*marks, _TITLE], takes_pictures)
    tokenizer.save_pretrained(folder)
    vocab = tokenizer.get_vocab()

    def id_of(piece: str) -> int:
        return int(vocab[piece if piece in vocab else _as_bytes(piece)])

    eos = vocab[_END]
    steps = [
        (id_of(piece), id_of(following) if following else eos)
        for chain in chains
        for piece, following in zip(chain, [*chain[1:], ""], strict=True)
    ]
    model = _make_model(len(vocab), steps, eos, positions)
    if takes_pictures:
        model = _with_pictures(model, id_of(_IMAGE))
        write_processor_files(folder, "llava")
    model.save_pretrained(folder)
    return folder


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    """Cut the text so that no piece comes twice."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        while text[start:end] in used and end < len(text):
            end += 1
        piece = text[start:end]
        if len(text) - end < _PIECE and text[start:] not in used:
            piece = text[start:]  # no short rest, which could come twice
        assert piece not in used, "the text has too little variety to be cut"
        used.add(piece)
        yield piece
        start += len(piece)


def _make_model(vocab_size: int, steps: Sequence[tuple[int, int]], eos: int, positions: int) -> Any:
    """A dimension for each token that another one follows; all others are followed by the end."""
    hidden_size = -(len(steps) + 1) // 64 * -64
    config = make_config(
        "llama", vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=1,
        max_position_embeddings=positions, bos_token_id=None, eos_token_id=eos,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # what the layers compute changes nothing
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        head.zero_()
        embedding[:, len(steps)] = 1.0
        head[eos, len(steps)] = 10.0
        for dimension, (token_id, following) in enumerate(steps):
            embedding[token_id] = 0.0
            embedding[token_id, dimension] = 1.0
            head[following, dimension] = 10.0
    model.generation_config.eos_token_id = eos
    return model


def _with_pictures(model: Any, image_id: int) -> Any:
    """A LLaVA checkpoint whose text model is `model`."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
              "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
              "patch_size": 14}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=model.config, vision_config=vision, image_token_index=image_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    whole = transformers.LlavaForConditionalGeneration(config).float().eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.generation_config = model.generation_config
    return whole


def _tokenizer(pieces: Sequence[str], marks: Sequence[str], takes_pictures: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_as_bytes, pieces)]
    assert len(set(vocabulary)) == len(vocabulary), "a piece is there twice"
    model = models.BPE(vocab={piece: index for index, piece in enumerate(vocabulary)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_START, *marks])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        extra_special_tokens={"image_token": _IMAGE} if takes_pictures else {},
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _as_bytes(text: str) -> str:
    """As byte-level tokenizers write it."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
