"""The work of the branch benchmark and who does it: radixserve warm and cold, and transformers.

radix            radixserve as it is
cold             radixserve with cache="off": every request is computed whole
transformers     `generate` on the same checkpoint
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from radixserve import ChatSession, Runtime, SamplingParams

LOWEST_ID = 8  # ids below are special tokens
DTYPE = "float32"
_WARM = 48  # tokens of a prompt that warms up


class Played(NamedTuple):
    """What came out. Requests in order of sending; samples of one prompt one after another."""

    outputs: list[list[int]]
    num_prompted: int  # prompt tokens of all requests
    num_computed: int  # of them computed, padding included
    scores: tuple[float, ...] = ()  # of beams


class Work(Protocol):
    """What is to be done; `shrunk` gives the same in small, to warm up."""

    def shrunk(self) -> Work: ...


class Player(Protocol):
    """One engine, open for one kind of work."""

    def play(self, work: Any) -> Played: ...

    def reset(self) -> None:
        """Forget every prompt; never timed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Samples:
    """`count` random continuations of one prompt."""

    prompt: tuple[int, ...]
    count: int
    num_new: int

    def shrunk(self) -> Samples:
        return Samples(self.prompt[-_WARM:], 2, 2)


@dataclass(frozen=True)
class Chats:
    """`said[turn][session]`; all sessions say their turn at the same moment. `prompts`: for who
    keeps no chats, the whole history of each session and turn as token ids."""

    said: tuple[tuple[str, ...], ...]
    num_new: int
    prompts: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def shrunk(self) -> Chats:
        return Chats(self.said[:1], 2, self.prompts[:1])


@dataclass(frozen=True)
class Beams:
    """The best `width` continuations of one prompt by beam search."""

    prompt: tuple[int, ...]
    width: int
    num_new: int

    def shrunk(self) -> Beams:
        return replace(self, prompt=self.prompt[-_WARM:], num_new=2)


def random_prompt(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(LOWEST_ID, vocab, length).tolist())


def random_words(count: int, seed: int) -> str:
    """Words of the demo model's corpus, in no order."""
    rng = np.random.default_rng([seed, 7])
    words = "list tuple string value index error return module object class file name".split()
    return " ".join(rng.choice(words, count).tolist())


class _Ours:
    """radixserve; `cache`: "radix" or "off"."""

    def __init__(self, folder: Path, num_tokens: int, cache: str) -> None:
        self._rt = Runtime(folder, dtype=DTYPE, cache=cache, num_pages=num_tokens)

    def reset(self) -> None:
        self._rt.flush_cache()

    def close(self) -> None:
        self._rt.close()

    @staticmethod
    def _played(outs: list[Any]) -> Played:
        return Played(
            [out.token_ids for out in outs],
            sum(out.usage.prompt_tokens for out in outs),
            sum(out.usage.computed_tokens for out in outs),
        )


class OurSamples(_Ours):
    """n=count, or, without a cache, as many requests with the same seeds."""

    def __init__(self, folder: Path, work: Samples, cache: str) -> None:
        length = len(work.prompt) + work.num_new
        super().__init__(folder, length * work.count + 256, cache)
        self._is_warm = cache != "off"

    def play(self, work: Samples) -> Played:
        params = SamplingParams(max_tokens=work.num_new, ignore_eos=True, seed=0)
        prompt = list(work.prompt)
        if self._is_warm:
            return self._played(self._rt.generate(prompt, replace(params, n=work.count)))
        each = [replace(params, seed=seed) for seed in range(work.count)]
        return self._played(self._rt.generate([prompt] * work.count, each, progress=False))


class OurChats(_Ours):
    """Chat sessions that all send at once."""

    def __init__(self, folder: Path, work: Chats) -> None:
        most = sum(len(text) for turn in work.said for text in turn)
        count = sum(map(len, work.said))
        super().__init__(folder, most + count * (work.num_new + 64) + 256, "radix")
        self._chats: list[ChatSession] = []
        self.prompts: list[tuple[tuple[int, ...], ...]] = []

    def play(self, work: Chats) -> Played:
        warnings.simplefilter("error")  # a history that is rewritten would spoil the counts
        params = SamplingParams(max_tokens=work.num_new, temperature=0.0, ignore_eos=True)
        chats = [self._rt.chat(params=params) for _ in work.said[0]]
        outs = []
        self.prompts.clear()
        for turn in work.said:
            new = asyncio.run(_send(chats, turn))
            outs += new
            self.prompts.append(
                tuple(tuple(chat.tokens[: -work.num_new].tolist()) for chat in chats)
            )
        for chat in chats:
            chat.close()
        return self._played(outs)


async def _send(chats: list[ChatSession], said: tuple[str, ...]) -> list[Any]:
    return await asyncio.gather(*(c.asend(text) for c, text in zip(chats, said, strict=True)))


class ResentChats(_Ours):
    """The whole history of every turn, to an engine that keeps nothing."""

    def __init__(self, folder: Path, work: Chats) -> None:
        most = max(sum(map(len, turn)) for turn in work.prompts)
        super().__init__(folder, most + len(work.said[0]) * (work.num_new + 1) + 256, "off")

    def play(self, work: Chats) -> Played:
        params = SamplingParams(max_tokens=work.num_new, temperature=0.0, ignore_eos=True)
        outs = []
        for turn in work.prompts:
            outs += self._rt.generate([list(prompt) for prompt in turn], params, progress=False)
        return self._played(outs)


class OurBeams(_Ours):
    """`Runtime.beam_search`."""

    def __init__(self, folder: Path, work: Beams) -> None:
        length = len(work.prompt) + 2 * work.width * work.num_new
        super().__init__(folder, length + 256, "radix")

    def play(self, work: Beams) -> Played:
        outs = self._rt.beam_search(list(work.prompt), work.width, work.num_new, ignore_eos=True)
        return self._played(outs)._replace(scores=tuple(out.score for out in outs))


class Transformers:
    """`generate`; tokens are counted where they go into the model."""

    def __init__(self, folder: Path) -> None:
        from engine_contenders import Job
        from engine_peers import Model
        from engine_workloads import Workload

        self._model = Model(Job(folder, DTYPE, Workload("", "", (), 0, 0)))

    def play(self, work: Samples | Beams) -> Played:
        import torch

        ids = torch.tensor([work.prompt])
        count = work.count if isinstance(work, Samples) else work.width
        how: dict[str, Any] = {"num_beams": count, "do_sample": False}
        if isinstance(work, Samples):
            how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(0)
        before = self._model.num_tokens
        with torch.inference_mode():
            out = self._model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=work.num_new,
                num_return_sequences=count,
                return_dict_in_generate=True,
                output_scores=True,
                **how,
            )
        decoded = count * (work.num_new - 1)
        rows = out.sequences[:, len(work.prompt) :].tolist()
        scores = () if isinstance(work, Samples) else tuple(out.sequences_scores.tolist())
        computed = self._model.num_tokens - before - decoded
        return Played(rows, count * len(work.prompt), computed, scores)

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


_OPENERS: dict[tuple[str, type], Callable[[Path, Any], Any]] = {
    ("radix", Samples): lambda folder, work: OurSamples(folder, work, "radix"),
    ("cold", Samples): lambda folder, work: OurSamples(folder, work, "off"),
    ("transformers", Samples): lambda folder, _: Transformers(folder),
    ("radix", Chats): OurChats,
    ("cold", Chats): ResentChats,
    ("radix", Beams): OurBeams,
    ("transformers", Beams): lambda folder, _: Transformers(folder),
}


def open_player(name: str, work: Work, folder: Path) -> Player:
    """Load the model."""
    player: Player = _OPENERS[name, type(work)](folder, work)
    return player


def chat_prompts(folder: Path, work: Chats) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`Chats.prompts` of a chat: what its sessions have sent, as token ids."""
    player = OurChats(folder, work)
    player.play(work)
    player.close()
    return tuple(player.prompts)
