"""A checkpoint whose every answer is a given text: a model of pairs of tokens.

    python -m tests.server.scripted_model FOLDER

Each token of the answer is a piece that the tokenizer knows but never makes of a text: what comes
back from a client tokenises differently every time, so that only remembered ids meet the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import make_config

# Thinks, says something and calls a tool, as Qwen's models do.
CALL = ["<think>", "The sum", " is asked for.", "</think>", "Let me", " add", " them.",
        "<tool_call>", '{"name":  "add",', ' "arguments": {"a"', ":2,", ' "b":   3', "}}",
        "</tool_call>"]  # fmt: skip
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_START, _END = "<|im_start|>", "<|im_end|>"


def make_scripted(
    folder: Path,
    answer: Sequence[str] = CALL,
    *,
    positions: int = 8_192,
    template: str = TEMPLATE,
    special: Sequence[str] = (),
) -> Path:
    """Write it. After the line break of the assistant's header comes the answer, then the end.

    `special`: pieces of the answer that are special tokens."""
    tokenizer = _tokenizer(answer, template, special)
    tokenizer.save_pretrained(folder)
    vocab = tokenizer.get_vocab()
    ids = [vocab[_as_bytes("\n")], *(vocab[_as_bytes(piece)] for piece in answer)]
    eos = vocab[_END]
    size = len(vocab)
    hidden_size = -(len(ids) + 1) // 64 * -64  # a dimension for each token of the answer
    config = make_config(
        "llama", vocab_size=size, hidden_size=hidden_size, num_hidden_layers=1,
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
        embedding[:, len(ids) - 1] = 1.0  # all other tokens end the answer, as its last one does
        head.zero_()
        for at, token_id in enumerate(ids):
            embedding[token_id] = 0.0
            embedding[token_id, at] = 1.0
            head[ids[at + 1] if at + 1 < len(ids) else eos, at] = 10.0
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    return folder


def _tokenizer(answer: Sequence[str], template: str, special: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_as_bytes, answer)]
    assert len(set(pieces)) == len(pieces), "a piece is there twice"
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, additional_special_tokens=[_START, *special]
    )
    wrapped.chat_template = template
    return wrapped


def _as_bytes(text: str) -> str:
    """As byte-level tokenizers write it."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


if __name__ == "__main__":
    make_scripted(Path(sys.argv[1]))
