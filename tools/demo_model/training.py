"""`Trainer`: the training run: model, optimizer, schedule, held-out loss."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.batches import Stream, held_out_batches, split_entries, train_tokenizer
from demo_model.corpus import load_entries
from demo_model.folder import write_folder
from demo_model.format import BOS, CONTEXT, EOS, PAD, SPECIAL

log = logging.getLogger("train_demo")


@dataclass(frozen=True)
class Earlier:
    """The totals of the runs that a run continues, from the header of the weights."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    commands: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            note = json.loads((file.metadata() or {}).get("training", "{}"))
        note["commands"] = tuple(note.get("commands", ()))
        return cls(**note)


@dataclass
class Progress:
    """The progress of a run, by its steps or by the clock, whichever is ahead."""

    steps: int | None
    minutes: float | None
    step: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def total(self, earlier: Earlier) -> Earlier:
        """Totals of all runs up to this one."""
        return Earlier(
            earlier.steps + self.step,
            earlier.tokens + self.tokens,
            earlier.minutes + self.elapsed / 60,
            earlier.commands,
        )

    @property
    def share(self) -> float:
        by_step = self.step / self.steps if self.steps else 0.0
        by_time = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_step, by_time))


def batch_shape(share: float) -> tuple[int, int]:
    """The rows and the length of a batch: short sequences first, the full context at the end.
    `share`: of the run that is done."""
    for limit, shape in ((0.72, (8, 512)), (0.84, (4, 1024)), (0.92, (2, 2048))):
        if share < limit:
            return shape
    return (1, CONTEXT)


def learning_rate(progress: Progress, peak: float) -> float:
    warm = min(1.0, (progress.step + 1) / 150)
    return peak * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress.share)))


def make_model(vocab: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(PAD),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: dict[str, torch.Tensor]) -> dict[str, float]:
    """The mean loss of each held-out batch, in nats per token."""
    model.eval()
    losses = {
        name: sum((float(loss_of(model, rows)) * len(rows) for rows in batch.split(8)), 0.0)
        / len(batch)
        for name, batch in held_out.items()
    }
    model.train()
    return losses


class Trainer:
    """Trains the model, logs its losses, and saves a usable folder every few minutes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        entries = load_entries()
        seed = options.seed
        self.train_entries, held_out_entries = split_entries(entries, seed)
        self.characters = sum(len(entry.text) for entry in entries)
        log.info("%d entries, %d characters", len(entries), self.characters)
        self.tokenizer = train_tokenizer(self.train_entries, options.vocab, seed)
        first = seed + 7919 if options.init else seed  # a continued run sees other chats
        self.stream = Stream(self.train_entries, self.tokenizer, first)
        self.held_out = held_out_batches(self.train_entries, held_out_entries, self.tokenizer, seed)
        self.model = make_model(options.vocab, seed)
        self.earlier = Earlier()
        if options.init:
            weights = load_file(options.init / "model.safetensors")
            self.model.load_state_dict(weights, strict=False)  # the tied head is not in the file
            self.model.tie_weights()
            self.earlier = Earlier.read(options.init)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        log.info("%d parameters; held out: %s", self.parameters,
                 {name: batch.numel() for name, batch in self.held_out.items()})  # fmt: skip
        self.run: Any = self.model if options.no_compile else torch.compile(self.model)
        self.optimizer = make_optimizer(self.model, options.lr)
        self.progress = Progress(options.steps, options.minutes)
        self.train_loss = math.nan
        self.losses: dict[str, float] = {}

    def one_step(self) -> float:
        rows, length = batch_shape(self.progress.share)
        rate = learning_rate(self.progress, self.options.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self.run, self.stream.batch(rows, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += rows * length
        return float(loss.detach())

    def report(self) -> None:
        progress = self.progress
        self.losses = evaluate(self.model, self.held_out)
        log.info(
            "step %d (%.0f %%) tokens %.2fM %.1f min %.0f tok/s train %.3f held out %s",
            progress.step, 100 * progress.share, progress.tokens / 1e6, progress.elapsed / 60,
            progress.tokens / progress.elapsed, self.train_loss,
            {name: round(value, 3) for name, value in self.losses.items()},
        )  # fmt: skip

    def train(self) -> None:
        saved = time.monotonic()
        while self.progress.share < 1.0:
            loss = self.one_step()
            old = loss if math.isnan(self.train_loss) else self.train_loss
            self.train_loss = old + 0.02 * (loss - old)
            if self.progress.step % 25 == 0:
                log.info("step %d train %.3f", self.progress.step, self.train_loss)
            if self.progress.step % 250 == 0:
                self.report()
            if time.monotonic() - saved > 60 * self.options.save_minutes:
                self.save()
                saved = time.monotonic()
        self.save()

    def summary(self) -> Earlier:
        """The totals of all training, this run included."""
        options = self.options
        limit = f"--steps {options.steps}" if options.steps else f"--minutes {options.minutes:g}"
        command = f"python tools/train_demo.py {limit} --seed {options.seed} --lr {options.lr:g}"
        command += f" --threads {options.threads}"
        if options.init:
            command += " --init radixserve/models/demo"
        total = self.progress.total(self.earlier)
        return replace(total, commands=(*total.commands, command))

    def save(self) -> None:
        self.report()
        write_folder(self, self.options.out)
        log.info("saved %s", self.options.out)
