"""Models whose counts and sizes are not those of their tensors: one line of error, at once; and
files with anything wrong: an error of ours or an answer."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import Runtime, SamplingParams
from radixserve.errors import InvalidRequest, RadixServeError
from radixserve.gguf_file import GgufFile
from tests.checkpoints import edit_json, make_checkpoint

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
from tests.models.gguf_files import write_gguf  # noqa: E402

NATIVE, WRAPPED = "llama", "gpt_neox"
HUGE = 10**12
MOST_CPU_SECONDS = 1.0
PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A native model, one in transformers' code, and one with experts; all were loaded once."""
    made = {}
    for family in (NATIVE, WRAPPED, "qwen3_moe", "gpt_oss"):
        made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        assert outcome(made[family]) == "answer"
    return made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("gguf"), NATIVE, with_tokenizer=True)
    return write_gguf(folder / "model.gguf", folder, "Q8_0")


def outcome(path: Path) -> str:
    """ "answer", or the error of a model that is loaded and asked for some tokens."""
    try:
        with Runtime(path, num_pages=64) as rt:
            answer = rt.generate(PROMPT, PARAMS)
    except RadixServeError as error:
        said = str(error)
    else:
        return "answer" if len(answer.token_ids) == PARAMS.max_tokens else answer.finish_reason
    assert "\n" not in said
    return said


@contextmanager
def at_once() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < MOST_CPU_SECONDS


def copied(folder: Path, to: Path, **fields: Any) -> Path:
    to.mkdir(exist_ok=True)
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    edit_json(to / "config.json", **fields)
    return to


LIES: list[tuple[str, str, Any]] = [
    *((family, "num_hidden_layers", 10**9) for family in (NATIVE, WRAPPED, "qwen3_moe", "gpt_oss")),
    *((family, "vocab_size", HUGE) for family in (NATIVE, WRAPPED)),
    *((family, "hidden_size", HUGE) for family in (NATIVE, WRAPPED)),
    *((family, "intermediate_size", HUGE) for family in (NATIVE, WRAPPED)),
    *((family, "num_attention_heads", HUGE) for family in (NATIVE, WRAPPED)),
    *((NATIVE, name, HUGE) for name in ("num_key_value_heads", "head_dim")),
    *((family, "max_position_embeddings", HUGE) for family in (NATIVE, WRAPPED)),
    ("qwen3_moe", "num_experts", HUGE),
    ("qwen3_moe", "moe_intermediate_size", HUGE),
    ("qwen3_moe", "num_experts_per_tok", HUGE),
    ("gpt_oss", "num_local_experts", HUGE),
    *((NATIVE, "num_hidden_layers", value) for value in (-2, 0, 2.0, "2", True, [2])),
    *((WRAPPED, "num_hidden_layers", value) for value in (-2, 0, 2.0, "2", True)),
    *((NATIVE, "vocab_size", value) for value in (-1, 0, 288.5, "many", 1e300)),
    (WRAPPED, "hidden_size", -64),
    (NATIVE, "max_position_embeddings", "long"),
    ("qwen3_moe", "num_experts", -6),
]


@pytest.mark.parametrize(("family", "name", "value"), LIES)
def test_a_field_that_no_such_model_has(
    tmp_path: Path, checkpoints: dict[str, Path], family: str, name: str, value: Any
) -> None:
    folder = copied(checkpoints[family], tmp_path / "model", **{name: value})
    with at_once():
        error = outcome(folder)
    assert f"config.json: {name} is " in error or "whole number" in error


@pytest.mark.parametrize("family", [NATIVE, WRAPPED])
@pytest.mark.parametrize("factor", [2, 64])
@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size"])
def test_a_size_that_its_tensors_do_not_have(
    tmp_path: Path, checkpoints: dict[str, Path], family: str, name: str, factor: int
) -> None:
    own = json.loads((checkpoints[family] / "config.json").read_text())[name]
    folder = copied(checkpoints[family], tmp_path / "model", **{name: factor * own})
    with at_once():
        error = outcome(folder)
    assert "must be" in error or "mismatched" in error or "parameters" in error or "size" in error


@pytest.mark.parametrize("bit", range(32))
def test_a_bit_of_block_count(tmp_path: Path, file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    key = b"llama.block_count"
    at = data.index(key) + len(key) + 4 + bit // 8
    data[at] ^= 1 << bit % 8
    (tmp_path / "model.gguf").write_bytes(data)
    assert GgufFile(tmp_path / "model.gguf").field("block_count") == 2 ^ 1 << bit
    with at_once():
        assert outcome(tmp_path / "model.gguf") != "answer"


def test_a_tokenizer_that_is_larger_than_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", NATIVE, with_tokenizer=True, vocab_size=200)
    with pytest.raises(InvalidRequest, match=r"tokenizer has \d+ tokens, .* embeddings of 200"):
        Runtime(folder, num_pages=64)


def test_a_token_that_was_added_may_have_no_embedding(tmp_path: Path) -> None:
    """As the mark of a picture beside a text model."""
    folder = make_checkpoint(tmp_path / "model", NATIVE, with_tokenizer=True)
    described = json.loads((folder / "tokenizer.json").read_text())
    added = {**described["added_tokens"][0], "id": 288, "content": "<picture>"}
    described["added_tokens"].append(added)
    described["model"]["vocab"]["<picture>"] = 288
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert outcome(folder) == "answer"


def test_nothing_is_allocated_for_a_tensor_that_is_missing(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    folder = copied(checkpoints[NATIVE], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = outcome(folder)
    assert "missing tensors: model.norm.weight, model.layers.1.mlp.up_proj.weight" in error
    assert r"model.layers.0.mlp.down_proj.weight is [3, 5] and must be [64, 96]" in error


# -- anything wrong


def mutated_bytes(rng: random.Random, data: bytes, end: int) -> bytes:
    """Of the first `end` bytes some are changed, cut out, doubled, or are another number."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, kind = rng.randrange(end), rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)))
            changed[at : at + 8] = struct.pack("<Q", number)
        elif kind == 3:
            changed[at : at + 4] = struct.pack("<f", rng.choice((np.inf, np.nan, -1.0, 1e38, 0.5)))
        elif kind == 4:
            del changed[at : at + rng.choice((1, 4, 8, 32))]
        else:
            changed[at:at] = changed[at : at + rng.choice((1, 4, 8, 32))]
    if rng.random() < 0.05:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


ODD: list[Any] = [
    *(0, 1, -1, 2, 3, 5, 7, 64, 1000, 10**6, 2**31, 2**63, 10**12, 10**30, 0.5, -0.5, 1e30, 1e-30),
    *(
        None,
        True,
        False,
        "",
        "a",
        "nan",
        [],
        [0],
        [1, 2],
        [[1]],
        {},
        {"a": 1},
        {"rope_type": "yarn"},
    ),
    *(float("inf"), float("nan"), "full_attention", ["full_attention"] * 2, ["sliding_attention"]),
]


def mutated_config(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Some fields, also those of a part, are odd, gone, or another field's."""
    changed = json.loads(json.dumps(fields))
    for _ in range(rng.choice((1, 1, 2, 3))):
        parts = [changed, *(x for x in changed.values() if isinstance(x, dict) and x)]
        part = rng.choice(parts)
        name, kind = rng.choice(list(part)), rng.randrange(8)
        if kind == 0:
            del part[name]
        elif kind == 1:
            part[name] = rng.choice(list(part.values()))
        elif kind == 2 and isinstance(part[name], int | float):
            part[name] *= rng.choice((-1, 2, 0.5, 3, 10, 1000))
        else:
            part[name] = rng.choice(ODD)
        if not changed:
            break
    return changed


def check_all(tries: Iterator[Path]) -> Counter[str]:
    """Every model gives an error of ours or an answer within 5 s of CPU time."""
    found: Counter[str] = Counter()
    for number, path in enumerate(tries):
        began = time.process_time()
        try:
            result = outcome(path)
        except BaseException as error:
            raise AssertionError(f"number {number}: {error!r}") from error
        assert time.process_time() - began < 5, (number, result)
        found["answer" if result in ("answer", "error", "abort") else "error"] += 1
    print(dict(found))
    return found


def gguf_tries(file: Path, folder: Path, count: int, seed: int) -> Iterator[Path]:
    data, rng = file.read_bytes(), random.Random(seed)
    header = min(tensor.offset for tensor in GgufFile(file).tensors.values())
    (folder / "bad").mkdir()
    for number in range(count):
        # half of them in the fields and tensors' places, not in the vocabulary between
        end = header if number % 2 else data.index(b"tokenizer.ggml.tokens")
        path = folder / "bad" / "model.gguf"
        path.write_bytes(mutated_bytes(rng, data, end))
        yield path


def config_tries(folder: Path, to: Path, count: int, seed: int) -> Iterator[Path]:
    fields, rng = json.loads((folder / "config.json").read_text()), random.Random(seed)
    copied(folder, to)
    for _ in range(count):
        (to / "config.json").write_text(json.dumps(mutated_config(rng, fields)))
        yield to


def safetensors_tries(folder: Path, to: Path, count: int, seed: int) -> Iterator[Path]:
    data, rng = (folder / "model.safetensors").read_bytes(), random.Random(seed)
    (size,) = struct.unpack_from("<Q", data)
    copied(folder, to)
    header = json.loads(data[8 : 8 + size])
    for number in range(count):
        if number % 2:
            changed = mutated_bytes(rng, data, 8 + size)
        else:
            text = json.dumps(mutated_config(rng, header)).encode()
            changed = struct.pack("<Q", len(text)) + text + data[8 + size :]
        (to / "model.safetensors").write_bytes(changed)
        yield to


TRIES: dict[str, Callable[[dict[str, Path], Path, Path, int, int], Iterator[Path]]] = {
    "gguf": lambda _, file, to, count, seed: gguf_tries(file, to, count, seed),
    "config": lambda made, _, to, count, seed: config_tries(made[NATIVE], to / "m", count, seed),
    "experts": lambda made, _, to, count, seed: config_tries(
        made["qwen3_moe"], to / "m", count, seed
    ),
    "wrapped": lambda made, _, to, count, seed: config_tries(made[WRAPPED], to / "m", count, seed),
    "safetensors": lambda made, _, to, count, seed: safetensors_tries(
        made[NATIVE], to / "m", count, seed
    ),
}


@pytest.mark.parametrize("kind", TRIES)
def test_some_mutations(
    tmp_path: Path, checkpoints: dict[str, Path], file: Path, kind: str
) -> None:
    found = check_all(TRIES[kind](checkpoints, file, tmp_path, 12, 0))
    assert found.total() == 12


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "count"),
    [("gguf", 2_000), ("config", 600), ("experts", 300), ("wrapped", 150), ("safetensors", 600)],
)
def test_many_mutations(
    tmp_path: Path, checkpoints: dict[str, Path], file: Path, kind: str, count: int
) -> None:
    found = check_all(TRIES[kind](checkpoints, file, tmp_path, count, 1))
    assert found["error"] > count / 3
    assert found["answer"]
