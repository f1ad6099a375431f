"""Adapters give PEFT's tokens and log-probabilities, alone and mixed, to the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from tests.adapters.peft_adapters import FUSED, applied, greedy, make_adapter
from tests.checkpoints import load_reference, make_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "granite", "phi3", "mixtral")
COUNT = 6
CHOICES = ("", "all", "some")


class Case(NamedTuple):
    folder: Path
    adapters: dict[str, str]
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("llama", tmp_path_factory.mktemp("llama"))


def make_case(family: str, folder: Path) -> Case:
    checkpoint = make_checkpoint(folder / "model", family)
    model = load_reference(checkpoint)
    targets = {"phi3": FUSED, "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj")}
    more = {"targets": targets[family]} if family in targets else {}
    every = make_adapter(folder / "all", model, 1, **more)
    some = make_adapter(
        folder / "some",
        model,
        2,
        rank=3,
        targets=("qkv_proj", "down_proj") if family == "phi3" else ("q_proj", "v_proj"),
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 5},
        alpha_pattern={"layers.0.self_attn.v_proj": 3.5},
    )
    return Case(checkpoint, {"all": str(every), "some": str(some)}, model)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def params(adapter: str = "", **fields: Any) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**{**given, "logprobs": 0, "adapter": adapter, **fields})


def expected(case: Case, prompt: list[int], adapter: str) -> tuple[list[int], list[float]]:
    if not adapter:
        return greedy(case.model, prompt, COUNT)
    with applied(case.model, Path(case.adapters[adapter])):
        return greedy(case.model, prompt, COUNT)


def test_they_give_what_peft_gives(case: Case) -> None:
    prompts = [prompt_of(seed, 7 + 9 * seed) for seed in range(3)]
    pairs = [(prompt, adapter) for adapter in CHOICES for prompt in prompts]
    with Runtime(str(case.folder), num_pages=2048, adapters=case.adapters) as rt:
        cold = {}
        for prompt, adapter in pairs:
            out = rt.generate(prompt, params(adapter))
            tokens, logprobs = expected(case, prompt, adapter)
            assert out.token_ids == tokens
            assert out.logprobs == pytest.approx(logprobs, abs=1e-4)
            cold[tuple(prompt), adapter] = out.logprobs
        answers = {tuple(cold[tuple(prompts[2]), adapter]) for adapter in CHOICES}
        assert len(answers) == len(CHOICES)
        warm = [rt.generate(prompt, params(adapter)) for prompt, adapter in pairs]
        rt.flush_cache()
        mixed = rt.generate([prompt for prompt, _ in pairs], [params(name) for _, name in pairs])
        rt.check()
    for (prompt, adapter), again, beside in zip(pairs, warm, mixed, strict=True):
        assert again.usage.cached_tokens == len(prompt) - 1
        assert again.logprobs == beside.logprobs == cold[tuple(prompt), adapter]


@pytest.mark.parametrize("settings", [{"attention_backend": "torch"}, {"page_size": 16}])
def test_other_paths(llama: Case, settings: dict[str, Any]) -> None:
    prompts = [prompt_of(seed, 20) for seed in range(3)]
    with Runtime(str(llama.folder), num_pages=512, adapters=llama.adapters, **settings) as rt:
        answers = rt.generate(prompts, [params(adapter) for adapter in CHOICES])
    for prompt, adapter, out in zip(prompts, CHOICES, answers, strict=True):
        tokens, logprobs = expected(llama, prompt, adapter)
        assert out.token_ids == tokens
        assert out.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_neighbours_and_chunks(llama: Case, dtype: Any) -> None:
    prompts = [prompt_of(seed, 12 + 5 * seed) for seed in range(9)]
    each = [params(CHOICES[seed % 3]) for seed in range(9)]
    settings: dict[str, Any] = {"num_pages": 2048, "adapters": llama.adapters, "dtype": dtype}
    with Runtime(str(llama.folder), **settings) as rt:
        alone = [rt.generate(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        rt.flush_cache()
        beside = rt.generate(prompts, each)
    with Runtime(str(llama.folder), chunked_prefill_size=5, **settings) as rt:
        cut = rt.generate(prompts, each)
    wanted = [(out.token_ids, out.logprobs) for out in alone]
    assert [(out.token_ids, out.logprobs) for out in beside] == wanted
    assert [(out.token_ids, out.logprobs) for out in cut] == wanted


def test_preempted_requests_give_the_same(llama: Case) -> None:
    prompts = [prompt_of(seed, 24) for seed in range(6)]
    each = [params(CHOICES[seed % 3], max_tokens=24) for seed in range(6)]
    with Runtime(str(llama.folder), num_pages=2048, adapters=llama.adapters) as rt:
        wanted = [out.logprobs for out in rt.generate(prompts, each)]
    with Runtime(str(llama.folder), num_pages=120, adapters=llama.adapters) as rt:
        found = [out.logprobs for out in rt.generate(prompts, each)]
        assert rt.cache_stats()["preemptions"] > 0
        rt.check()
    assert found == wanted


def test_a_store_finds_its_kv_after_a_restart(llama: Case, tmp_path: Path) -> None:
    prompt = prompt_of(5, 200)
    settings: dict[str, Any] = {
        "num_pages": 2048,
        "adapters": llama.adapters,
        "kv_store": str(tmp_path),
        "kv_store_write": "finish",
    }
    cold, warm = {}, {}
    for outs in (cold, warm):
        with Runtime(str(llama.folder), **settings) as rt:
            for adapter in CHOICES:
                outs[adapter] = rt.generate(prompt, params(adapter))
    for adapter in CHOICES:
        assert cold[adapter].usage.cached_tokens == 0
        assert warm[adapter].usage.loaded_tokens == 199
        assert warm[adapter].logprobs == cold[adapter].logprobs


class TestLoading:
    @pytest.fixture
    def rt(self, llama: Case) -> Iterator[Runtime]:
        with Runtime(str(llama.folder), num_pages=512) as rt:
            yield rt
            rt.check()

    def test_other_files_under_the_same_name_reuse_nothing(self, rt: Runtime, llama: Case) -> None:
        prompt = prompt_of(1, 30)
        rt.load_adapter("sql", llama.adapters["all"])
        rt.generate(prompt, params("sql"))
        assert rt.lookup(prompt, adapter="sql").cached_len == 29
        assert rt.lookup(prompt).cached_len == 0
        rt.unload_adapter("sql")
        assert rt.cache_stats()["pages_cached"] == 0
        with pytest.raises(InvalidRequest, match="no adapter 'sql' is loaded"):
            rt.generate(prompt, params("sql"))
        rt.load_adapter("sql", llama.adapters["some"])
        out = rt.generate(prompt, params("sql"))
        assert out.usage.cached_tokens == 0
        assert out.token_ids == expected(llama, prompt, "some")[0]

    def test_an_unload_waits_for_open_requests(self, rt: Runtime, llama: Case) -> None:
        rt.load_adapter("sql", llama.adapters["all"])
        stream = rt.stream(prompt_of(2, 20), params("sql", max_tokens=40))
        first = next(stream)
        import threading

        thread = threading.Thread(target=rt.unload_adapter, args=("sql",))
        thread.start()
        *_, last = stream
        thread.join()
        tokens = [*first.token_ids]
        assert last.completion is not None
        assert len(last.completion.token_ids) == 40
        assert tokens == last.completion.token_ids[: len(tokens)]
        assert rt.adapters == {}

    def test_a_replaced_one_goes_after_its_open_requests(self, rt: Runtime, llama: Case) -> None:
        prompt, long = prompt_of(5, 20), params("sql", max_tokens=200)
        rt.load_adapter("sql", llama.adapters["all"])
        wanted = rt.generate(prompt, long)
        chunks = rt.stream(prompt, long)
        next(chunks)
        rt.load_adapter("sql", llama.adapters["some"], load_inplace=True)
        new = rt.generate(prompt, params("sql"))  # does not wait for the open one
        assert new.usage.cached_tokens == 0
        assert new.token_ids == expected(llama, prompt, "some")[0]
        *_, last = chunks
        assert last.completion is not None
        assert last.completion.logprobs == wanted.logprobs
        rt.unload_adapter("sql")
        counts = rt.cache_stats()["adapters"]
        assert isinstance(counts, dict)
        assert counts["in_memory"] == 0
        assert all("\0sql" not in str(name) for name in rt.cache_tree()["namespaces"])
        rt.check()

    def test_names_and_folders_are_checked(self, rt: Runtime, llama: Case, tmp_path: Path) -> None:
        rt.load_adapter("sql", llama.adapters["all"])
        with pytest.raises(InvalidRequest, match="is loaded: unload it first"):
            rt.load_adapter("sql", llama.adapters["some"])
        with pytest.raises(InvalidRequest, match="no adapter 'sq1' is loaded; did you mean sql"):
            rt.generate([1], params("sq1"))
        with pytest.raises(InvalidRequest, match="is no adapter: adapter_config"):
            rt.load_adapter("none", tmp_path)
        with pytest.raises(InvalidRequest, match="printable"):
            rt.load_adapter("\0", tmp_path)
        with pytest.raises(InvalidRequest, match="was unloaded"):
            rt.generate([1, 2], params(namespace="\0sql@00\0tenant"))

    def test_several_leave_memory_and_come_back(self, llama: Case, tmp_path: Path) -> None:
        folders = {
            f"a{seed}": str(make_adapter(tmp_path / f"a{seed}", llama.model, seed))
            for seed in range(4)
        }
        prompt = prompt_of(3, 16)
        with Runtime(str(llama.folder), num_pages=512, adapters=folders) as rt:
            size = rt.adapters["a0"].num_bytes
            wanted = [rt.generate(prompt, params(name)).logprobs for name in folders]
        settings: dict[str, Any] = {"adapters": folders, "adapter_memory": 2 * size}
        with Runtime(str(llama.folder), num_pages=512, **settings) as rt:
            each = [params(name) for name in folders]
            for _ in range(2):
                outs = rt.generate([prompt] * 4, each)
                assert [out.logprobs for out in outs] == wanted
            stats: Any = rt.cache_stats()
            assert stats["adapters"]["in_memory"] <= 2
            assert stats["adapters"]["read_again"] >= 2
            rt.check()
            (tmp_path / "a0" / "adapter_model.safetensors").write_bytes(
                (tmp_path / "a1" / "adapter_model.safetensors").read_bytes()
            )
            rt.generate([prompt] * 2, each[2:])
            with pytest.raises(Exception, match="have changed since it was loaded"):
                rt.generate(prompt, each[0])
            assert rt.generate(prompt, each[1]).logprobs == wanted[1]
        with pytest.raises(InvalidRequest, match="adapter_memory is"):
            Runtime(str(llama.folder), num_pages=64, adapters=folders, adapter_memory=size - 1)

    def test_a_rank_above_256(self, rt: Runtime, llama: Case, tmp_path: Path) -> None:
        folder = make_adapter(tmp_path / "a", llama.model, 0, rank=300, targets=("q_proj",))
        with pytest.raises(ModelNotSupported, match="rank 300; ranks of at most 256"):
            rt.load_adapter("a", folder)

    def test_a_rank_of_256(self, rt: Runtime, llama: Case, tmp_path: Path) -> None:
        folder = make_adapter(tmp_path / "a", llama.model, 0, rank=256, alpha=64)
        rt.load_adapter("a", folder)
        prompt = prompt_of(4, 20)
        out = rt.generate(prompt, params("a"))
        with applied(llama.model, folder):
            assert out.token_ids == greedy(llama.model, prompt, COUNT)[0]
