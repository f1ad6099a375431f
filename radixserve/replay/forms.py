"""The three forms of a trace's requests, each read line by line: see `reader`.

`add` takes a line in and says how many tokens its prompt and its output have; `finish` gives the
tokens of those that are wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.replay.lines import Line
from radixserve.replay.packed_tokens import PackedTokens
from radixserve.replay.splitmix import block_tokens
from radixserve.replay.text_tokens import tokenize
from radixserve.replay.tokens import HashTokens, runs_of
from radixserve.replay.trace import Ints

FORMS = '"hash_ids", "hash_runs", "text", "tokens" or "prompt"'
_PRIVATE = 1 << 42  # first block id of outputs of which only the length is known


class Chosen(NamedTuple):
    """The requests of the trace, in its order."""

    lines: Ints  # the number of each one's line among the records
    num_prompt: Ints
    num_output: Ints
    stitch: bool


class HashReader:
    def __init__(self, header: dict[str, Any], first: Line) -> None:
        size = header.get("block_size", 512)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
            raise InvalidRequest(
                f'{first.path}:1: "block_size" must be tokens a block, got {shown(size)}'
            )
        self._size = size
        self._runs: list[Ints] = []

    def add(self, line: Line) -> tuple[int, int]:
        """Take a line in; tokens of its prompt and its output."""
        num_prompt = line.length_at("input_length")
        if num_prompt is None:
            raise line.error('"input_length" is missing')
        runs = self._read_runs(line)
        num_blocks = int(runs[:, 1].sum())
        if not num_prompt // self._size <= num_blocks <= -(-num_prompt // self._size):
            raise line.error(
                f"{num_blocks} blocks of {self._size} tokens do not fit a prompt of {num_prompt}"
            )
        self._runs.append(runs)
        return num_prompt, line.length_at("output_length") or 0

    def finish(self, chosen: Chosen) -> tuple[HashTokens, Ints]:
        """The tokens, and their number for each request in order."""
        runs = [self._runs[line] for line in chosen.lines]
        counts = chosen.num_prompt, chosen.num_output
        return HashTokens(self._size, runs, *counts, stitch=chosen.stitch), np.arange(len(runs))

    def _read_runs(self, line: Line) -> Ints:
        name = "hash_ids" if "hash_ids" in line.fields else "hash_runs"
        is_runs = name == "hash_runs"
        given = line.fields.get(name)
        try:
            ids = np.asarray(given if isinstance(given, list) else None)
            if not ids.size:
                return np.empty((0, 2), np.int64)
            is_good = ids.dtype == np.int64 and ids.ndim == 1 + is_runs and ids.min() >= 0
            if is_good and (not is_runs or (ids.shape[1] == 2 and (ids[:, 1] > 0).all())):
                return ids if is_runs else runs_of(ids)
        except (ValueError, OverflowError, TypeError):
            pass
        what = "[first, count] pairs" if is_runs else "block ids"
        raise line.error(f'"{name}" must be a list of {what}, got {shown(given)}')


class TextReader:
    def __init__(self, header: dict[str, Any], first: Line) -> None:
        prefixes = header.get("prefixes", {})
        texts = prefixes.values() if isinstance(prefixes, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f'{first.path}:1: "prefixes" must be an object of texts')
        self._prefixes = {name: tokenize(text) for name, text in prefixes.items()}
        self._numbers: dict[str, int] = {}  # by id
        self._packed = PackedTokens()

    def add(self, line: Line) -> tuple[int, int]:
        """Take a line in; tokens of its prompt and its output."""
        text, output = line.text_at("text"), line.text_at("output")
        if text is None:
            raise line.error('"text" is missing')
        prompt = np.concatenate((self._base(line), tokenize(text)))
        answer = tokenize(output or "")
        name = line.text_at("id")
        if name is not None:
            if name in self._numbers:
                raise line.error(f'"id" {name} is there already')
            self._numbers[name] = len(self._packed)
        self._packed.add(prompt, answer)
        return len(prompt), len(answer)

    def finish(self, chosen: Chosen) -> tuple[PackedTokens, Ints]:
        """The tokens, and their number for each request in order."""
        return self._packed, chosen.lines

    def _base(self, line: Line) -> IntArray:
        parent = line.text_at("parent")
        if parent is not None and parent != "-1":
            number = self._numbers.get(parent)
            if number is None:
                raise line.error(f'"parent" {parent} is not the "id" of a line before')
            return np.concatenate(self._packed.tokens(number))
        prefix = line.text_at("prefix")
        if prefix is None:
            return np.empty(0, np.int32)
        if prefix not in self._prefixes:
            raise line.error(f'"prefix" {prefix} is not in the header')
        return self._prefixes[prefix]


class TokenReader:
    def __init__(self) -> None:
        self._packed = PackedTokens()

    def add(self, line: Line) -> tuple[int, int]:
        """Take a line in; tokens of its prompt and its output."""
        prompt = self._ids(line, "tokens")
        if prompt is None:
            prompt = self._ids(line, "prompt")
        if prompt is None:
            raise line.error(f"a request needs one of {FORMS}")
        output = self._ids(line, "output_tokens")
        if output is None:
            output = self._ids(line, "output")
        if output is None:
            output = block_tokens(
                _PRIVATE + len(self._packed), line.length_at("output_length") or 0
            )
        self._packed.add(prompt, output)
        return len(prompt), len(output)

    def finish(self, chosen: Chosen) -> tuple[PackedTokens, Ints]:
        """The tokens, and their number for each request in order."""
        return self._packed, chosen.lines

    def _ids(self, line: Line, name: str) -> IntArray | None:
        """Token ids, or text; None when missing."""
        given = line.fields.get(name)
        if given is None:
            return None
        if isinstance(given, str) and name != "tokens":
            return tokenize(given)
        try:
            ids = np.asarray(given if isinstance(given, list) else None)
            if not ids.size and ids.ndim == 1:
                return np.empty(0, np.int32)
            if ids.dtype == np.int64 and ids.ndim == 1 and ids.min() >= 0 and ids.max() < 2**31:
                return ids.astype(np.int32)
        except (ValueError, OverflowError, TypeError):
            pass
        or_text = "" if name == "tokens" else "text or "
        raise line.error(f'"{name}" must be {or_text}a list of token ids, got {shown(given)}')
