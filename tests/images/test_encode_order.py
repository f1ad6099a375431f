"""Tenants take turns at the encoder, and pay for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixserve import Runtime, SamplingParams
from radixserve.models.vision_tower import VisionTower
from tests.images.vision_checkpoints import make_vision_checkpoint, picture, said
from tests.pacing import PATIENCE_S, held, wait_until

FEW = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
ROW_BYTES = 4 * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, num_pages=8192, tenant_weights={"heavy": 3.0}) as runtime:
        runtime.generate([said(picture(1))], FEW)  # loads the tower
        yield runtime
        runtime.check()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pixels of what is encoded, in this order; each takes a while."""
    encode, order = VisionTower.encode, []

    def slow(tower: VisionTower, inputs: Mapping[str, Any]) -> Any:
        order.append(inputs["pixel_values"].tobytes())
        time.sleep(0.02)
        return encode(tower, inputs)

    monkeypatch.setattr(VisionTower, "encode", slow)
    return order


def of(tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, namespace=tenant)


def owners(runtime: Runtime, encoded: list[bytes], seeds: Mapping[str, range]) -> str:
    """Whose picture each one was: a letter each."""
    assert runtime.pictures is not None
    by_pixels = {
        runtime.pictures.read_part({"type": "image", "image": picture(seed)})
        .inputs["pixel_values"]
        .tobytes(): tenant
        for tenant, range_ in seeds.items()
        for seed in range_
    }
    return "".join(by_pixels[pixels] for pixels in encoded)


def send(runtime: Runtime, chats: Mapping[str, list[Any]]) -> dict[str, float]:
    """Send a chat of each tenant, in this order. Returns the seconds that each waited for its first
    token."""
    with ThreadPoolExecutor(len(chats)) as pool:
        with held(runtime, 0):
            outs = {}
            for number, (tenant, chat) in enumerate(chats.items(), 1):
                outs[tenant] = pool.submit(runtime.generate, chat, of(tenant))
                wait_until(partial(are_open, runtime, number))
        return {tenant: out.result(PATIENCE_S).metrics.ttft_s for tenant, out in outs.items()}


def are_open(runtime: Runtime, count: int) -> bool:
    stats: Any = runtime.cache_stats()
    return count == sum((stats["pictures"]["held_requests"], stats["running"], stats["waiting"]))


def test_pictures_of_one_tenant_do_not_delay_those_of_others(
    runtime: Runtime, encoded: list[bytes]
) -> None:
    seeds = {"a": range(100, 112), "b": range(200, 202), "c": range(300, 301)}
    chats = {name: [said(*map(picture, seeds[name]), "Hm")] for name in seeds}
    waited = send(runtime, chats)
    order = owners(runtime, encoded, seeds)
    assert order.count("a") == 12
    assert order.index("c") <= 2
    assert order.rindex("b") <= 5
    assert max(waited["b"], waited["c"]) < waited["a"]


def test_what_needs_no_encoding_passes(runtime: Runtime, encoded: list[bytes]) -> None:
    """A chat whose picture is cached, and one whose picture has been encoded for another."""
    known = [said(picture(400), "One")]
    runtime.generate(known, of("b"))
    runtime.generate([said(picture(401), "Two")], of("a"))
    encoded.clear()
    chats = {"a": [said(*map(picture, range(410, 418)))], "b": known}
    waited = send(runtime, chats)
    assert waited["b"] < waited["a"] / 2
    waited = send(runtime, {"a": [said(*map(picture, range(420, 428)))], "b": [said(picture(401))]})
    assert waited["b"] < waited["a"] / 2
    assert len(encoded) == 16


def test_encoding_is_charged_to_who_asked(runtime: Runtime, encoded: list[bytes]) -> None:
    """A tenant of weight 3 pays a third for each picture, and gets three for one of another's."""
    seeds = {"heavy": range(500, 509), "e": range(520, 529)}
    send(runtime, {name: [said(*map(picture, seeds[name]))] for name in seeds})
    order = owners(runtime, encoded, {"h": seeds["heavy"], "e": seeds["e"]})
    assert order[:8].count("h") >= 5, order
    assert order[:8].count("e") >= 1, order
    stats: Any = runtime.cache_stats()
    assert stats["pictures"]["encode_s"] > 0.02 * len(order)


def test_little_memory(folder: Path, encoded: list[bytes]) -> None:
    """Requests whose pictures do not fit side by side come one after the other, whole ones: none is
    encoded twice, nor does any wait for ever."""
    chats = [[said(*map(picture, range(seed, seed + 4)))] for seed in range(600, 640, 10)]
    with Runtime(folder, num_pages=4096, image_memory=5 * 16 * ROW_BYTES) as runtime:
        with ThreadPoolExecutor(len(chats)) as pool:
            futures = [
                pool.submit(runtime.generate, chat, of(f"t{number % 3}"))
                for number, chat in enumerate(chats)
            ]
            outs = [future.result(PATIENCE_S) for future in futures]
        assert all(out.usage.completion_tokens == 2 for out in outs)
        assert len(encoded) == 16
        runtime.check()
