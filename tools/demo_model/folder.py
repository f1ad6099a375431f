"""`write_folder`: the model's folder: weights, config, tokenizer, chat template and model card."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.format import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    CONTEXT,
    END,
    EOS,
    PAD,
    SPECIAL,
    SYSTEM,
    USER,
)
from demo_model.questions import ROLES

if TYPE_CHECKING:
    from demo_model.training import Trainer


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_json(config: LlamaConfig) -> dict[str, object]:
    """The configuration in the older layout, which every loader of Llama models reads."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
        "mlp_bias", "attention_dropout", "initializer_range", "bos_token_id", "eos_token_id",
        "pad_token_id",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        **{name: getattr(config, name) for name in names},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_cache": True,
    }


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, most: int = 160) -> str:
    """A greedy completion, for the sample in the model card."""
    ids = tokenizer.encode(prompt).ids
    made: list[int] = []
    stops = {SPECIAL.index(EOS), SPECIAL.index(END)}
    while len(made) < most:
        logits = model(input_ids=torch.tensor([ids + made])).logits
        token = int(logits[0, -1].argmax())
        if token in stops:
            break
        made.append(token)
    return tokenizer.decode(made)


CARD = """\
# The demo model

A Llama of {parameters:,} parameters that ships with radixserve, so that `Runtime("demo")` works
with no download. It was trained from scratch on the documentation that comes with
Python, and writes documentation-like English about the standard library.

It is a toy for trying the engine out and for tests: it is not clever, it is often wrong, it
invents functions and arguments, and it knows nothing but Python's documentation. Do not rely on
what it says.

## Shape

| | |
|---|---|
| architecture | `LlamaForCausalLM`, tied embeddings, {layers} layers, hidden size {hidden} |
| attention | {heads} query heads and {kv} key/value heads of 64 |
| feed-forward | {inner} |
| vocabulary | {vocab:,} byte-level BPE tokens |
| context | {context:,} tokens |
| weights | stored as bfloat16, `dtype` in `config.json` is float32 |

## Chat format

    {bos}{system}You are helpful.{end}{user}What is json?{end}{assistant}

The markers are single tokens with nothing between them; the answer ends with `{end}`. The
rendering of a longer history starts with the rendering of the shorter one, so each turn reuses
the cached prefix of the turn before. The tokenizer adds no token of its own; the template writes
`{bos}`. Both `{eos}` and `{end}` end a generation. The special tokens:

{special}

## Data and licence

The text comes from the Python {python} installation that ran the training, and from nowhere else:
the language topics of `pydoc_data/topics.py` and the docstrings of the standard library
({characters:,} characters; files that open with a licence notice of their own are left out).
Its notice is "{copyright}
All Rights Reserved.", and its licence is the Python Software Foundation License Version 2, which
allows redistribution. About thirty everyday questions and answers, the phrasings of the questions
and the system prompts were written for this model and are part of radixserve. From these the
script forms plain documents and synthetic chats of one to twelve turns, with system prompts of up
to a few thousand tokens. The weights are under the licence of radixserve; passages of the
documentation that the model repeats stay under the licence above.

## Training

    {commands}

AdamW (weight decay 0.1, clipped at 1.0), warm-up and cosine, bfloat16 autocast, batches of 4,096
tokens: rows of 512 for the first 72 % of a run, then rows of 1,024, 2,048 and 4,096.

| | |
|---|---|
| steps | {steps:,} |
| tokens seen | {tokens:,} |
| wall time | {minutes:.0f} minutes on a CPU |
| training loss (running mean) | {train_loss:.3f} |
{losses}

Loss is in nats per token. The docstrings held out are functions and methods that the training
never saw; the chats held out ask about things it did see. How far a run with `--minutes` gets
depends on the speed of the machine; `--steps` does not.

## Samples

Greedy, after the system prompt "{role}":

{samples}
"""


SAMPLE_QUESTIONS = (
    "What does json.dumps do?", "How do I read a file line by line?", "What is random.shuffle?"
)  # fmt: skip


def sample_text(trainer: Trainer, role: str) -> str:
    shown = []
    for question in SAMPLE_QUESTIONS:
        prompt = f"{BOS}{SYSTEM}{role}{END}{USER}{question}{END}{ASSISTANT}"
        reply = complete(trainer.model, trainer.tokenizer, prompt)
        quoted = "\n".join("> " + line if line else ">" for line in reply.split("\n"))
        shown.append(f"**{question}**\n\n{quoted}")
    return "\n\n".join(shown)


def write_card(trainer: Trainer, out: Path) -> None:
    config, total = trainer.model.config, trainer.summary()
    losses = (f"| held-out loss, {name} | {value:.3f} |" for name, value in trainer.losses.items())
    special = "\n".join(f"- `{name}` is {number}" for number, name in enumerate(SPECIAL))
    role = ROLES[1]
    card = CARD.format(
        parameters=trainer.parameters, layers=config.num_hidden_layers, hidden=config.hidden_size,
        heads=config.num_attention_heads, kv=config.num_key_value_heads,
        inner=config.intermediate_size, vocab=config.vocab_size, context=CONTEXT, bos=BOS, eos=EOS,
        system=SYSTEM, user=USER, assistant=ASSISTANT, end=END, special=special,
        python=platform.python_version(), characters=trainer.characters,
        commands="\n    ".join(total.commands),
        steps=total.steps, tokens=total.tokens, minutes=total.minutes,
        train_loss=trainer.train_loss, losses="\n".join(losses),
        role=role, samples=sample_text(trainer, role), copyright=sys.copyright.split("\n")[0],
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")


def write_folder(trainer: Trainer, out: Path) -> None:
    """Write the model's files, in place of those of an earlier call."""
    out.mkdir(parents=True, exist_ok=True)
    model = trainer.model
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    temporary = out / "model.safetensors.tmp"
    note = json.dumps(asdict(trainer.summary()))
    save_file(weights, temporary, metadata={"format": "pt", "training": note})
    temporary.chmod(0o644)
    temporary.replace(out / "model.safetensors")
    write_json(out / "config.json", config_json(model.config))
    stops = [SPECIAL.index(EOS), SPECIAL.index(END)]
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": SPECIAL.index(BOS),
            "eos_token_id": stops,
            "pad_token_id": SPECIAL.index(PAD),
        },
    )
    write_tokenizer(trainer.tokenizer, out)
    model.eval()
    write_card(trainer, out)
    model.train()
