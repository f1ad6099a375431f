"""Adapters that PEFT itself makes and saves: its tokens and its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from tests.adapters.peft_adapters import greedy
from tests.adapters.test_adapters import params, prompt_of
from tests.checkpoints import load_reference, make_checkpoint

peft = pytest.importorskip("peft")

COUNT = 4  # tokens
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Fields of LoraConfig. Each family gets all of these, some with names of its own.
KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": ATTENTION},
    "rank 8": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rank 256": {"r": 256, "lora_alpha": 64, "target_modules": ATTENTION, "use_rslora": True},
    "a regex": {"r": 4, "target_modules": r".*\.layers\.1\..*(o|down)_proj"},
    "some layers": {"r": 5, "target_modules": ["down_proj"], "layers_to_transform": [0]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 7, r"layers\.0\.self_attn\.o_proj": 2},
        "alpha_pattern": {"o_proj": 9.5, "layers.1.mlp.down_proj": 1},
    },
    "patterns and rslora": {
        "r": 6,
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.0": 3, r".*down_proj": 9},
        "alpha_pattern": {"down_proj": 2},
    },
}
OWN_NAMES: dict[str, dict[str, Any]] = {
    "phi3": {"target_modules": ["qkv_proj", "o_proj"]},
    "gpt_neox": {"target_modules": ["query_key_value", "dense"]},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "granite")


@pytest.mark.parametrize("family", FAMILIES)
def test_its_adapters_give_its_logprobs(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", family)
    prompt = prompt_of(len(family), 23)
    wanted, folders = {"": greedy(load_reference(checkpoint), prompt, COUNT)}, {}
    for seed, (kind, fields) in enumerate(KINDS.items()):
        if family in OWN_NAMES and fields["target_modules"] is ATTENTION:
            fields = {**fields, **OWN_NAMES[family]}
        torch.manual_seed(seed)
        config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields)
        model = peft.get_peft_model(load_reference(checkpoint), config).eval()
        wanted[kind] = greedy(model, prompt, COUNT)
        folders[kind] = str(tmp_path / kind)
        model.save_pretrained(folders[kind])
    assert len({tuple(logprobs) for _, logprobs in wanted.values()}) == len(wanted)
    with Runtime(str(checkpoint), num_pages=512, adapters=folders) as rt:
        each = [params(kind, max_tokens=COUNT) for kind in wanted]
        mixed = rt.generate([prompt] * len(wanted), each)
        rt.flush_cache()
        alone = [rt.generate(prompt, own) for own in each]
        warm = [rt.generate(prompt, own) for own in each]
    for (tokens, logprobs), one, beside, again in zip(
        wanted.values(), alone, mixed, warm, strict=True
    ):
        assert one.token_ids == tokens
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert one.logprobs == beside.logprobs == again.logprobs
