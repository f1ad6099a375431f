"""Trains the tokenizer, and makes an endless stream of packed batches of tokens."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.chats import Chats, Documents
from demo_model.corpus import Entry
from demo_model.format import BOS, EOS, SPECIAL


def split_entries(entries: Sequence[Entry], seed: int) -> tuple[list[Entry], list[Entry]]:
    """The entries to train with, and about 3 % of the docstrings, which are held out."""
    rng = random.Random(seed)
    held_out = {
        entry for entry in entries if entry.kind in {"function", "method"} and rng.random() < 0.03
    }
    train = [entry for entry in entries if entry not in held_out]
    return train, [entry for entry in entries if entry in held_out]


def train_tokenizer(entries: Sequence[Entry], vocab: int, seed: int) -> Tokenizer:
    chats = Chats(entries, random.Random(seed))
    plain = (Documents.show(entry) for entry in entries)
    strip = re.compile(r"<\|[a-z]+\|>")
    talk = (strip.sub("\n", chats.render(1500)) for _ in range(4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(plain, talk), trainer)
    return tokenizer


class Stream:
    """An endless stream of packed batches, drawn from chats and documents."""

    def __init__(self, entries: Sequence[Entry], tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.chats = Chats(entries, self.rng)
        self.documents = Documents(entries, self.rng)
        self.pending: list[int] = []

    def batch(self, rows: int, length: int) -> torch.Tensor:
        wanted = rows * length
        longest = int(length * 3.3)
        while len(self.pending) < wanted:
            texts = [
                (self.chats if self.rng.random() < 0.68 else self.documents).render(longest)
                for _ in range(32)
            ]
            for encoded in self.tokenizer.encode_batch(texts):
                self.pending.extend(encoded.ids)
        taken, self.pending = self.pending[:wanted], self.pending[wanted:]
        return torch.tensor(taken, dtype=torch.long).view(rows, length)


def held_out_batches(
    train: Sequence[Entry], held_out: Sequence[Entry], tokenizer: Tokenizer, seed: int
) -> dict[str, torch.Tensor]:
    """Rows of 512 tokens by name: documents of held-out entries, and new chats about entries of the
    training."""
    ids: list[int] = []
    for entry in held_out:
        ids += tokenizer.encode(f"{BOS}{Documents.show(entry)}{EOS}").ids
    rows = min(len(ids) // 512, 48)
    documents = torch.tensor(ids[: rows * 512], dtype=torch.long).view(rows, 512)
    chats = Chats(train, random.Random(seed + 999))
    ids = []
    while len(ids) < 32 * 512:
        ids += tokenizer.encode(chats.render(1500)).ids
    return {
        "unseen docstrings": documents,
        "unseen chats": torch.tensor(ids[: 32 * 512], dtype=torch.long).view(32, 512),
    }
