"""A walk over every causal model of the installed transformers: run right, or refused by name.

    python -m tests.models.causal_models             # the table of docs/models.md, written anew
    python -m tests.models.causal_models gemma2 opt  # these only, printed

Each gets a tiny config where one can be made, and a checkpoint of seeded weights. Its greedy tokens
and their log-probabilities are compared with the model's own eager attention over the whole
sequence: cold and warm at three page sizes, and with the cache off. Windows and chunks are shorter
than the prompt, and the answer crosses them.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from radixserve import Runtime, SamplingParams
from radixserve.errors import ModelNotSupported
from tests.checkpoints import make_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
MOST_PARAMETERS = 30_000_000
PROMPT, ANSWER = 70, 24
TOLERANCE, TIE = 2e-4, 1e-4
NATIVE, RIGHT, REFUSED = "right, native", "right, wrapped", "refused"
NOT_TRIED, WRONG = "not tried", "wrong"

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "q_lora_rank"), 24),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "d_kv", "rotary_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_chunk_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "linear_num_value_heads"), 8),
    "mamba_d_ssm": 128,
    "linear_num_key_heads": 4,
    "vocab_size": 288,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "sliding_window": 21,
    "attention_chunk_size": 16,
    "initializer_range": 0.15,
    "word_embed_proj_dim": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "minicpm3",
    "youtu",
)
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_SHARED = ["sliding_attention", "full_attention"] * 2  # the last two use keys of the first two
_PER_LAYER = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 288,
    "num_hidden_layers": 4,
}
OWN: dict[str, dict[str, Any]] = {  # what a family wants beside them
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "gemma3n_text": {"layer_types": _SHARED, "num_kv_shared_layers": 2, **_PER_LAYER},
    **{
        name: {
            **_PER_LAYER,
            "pad_token_id": 0,
            "layer_types": _SHARED,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
        }
        for name in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    },
    "emu3": {"pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 21},
    "gpt_neox": {"num_key_value_heads": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_ROPE},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"pad_token_id": 0, "local_attention": 42},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 16),
        **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
        "indexer_kv_heads": 1,
        **_ROPE,
    },
    "zamba2": {"layer_types": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        **dict.fromkeys(("ssm_state_size", "mamba_head_dim"), 16),
        "mamba_num_heads": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 96,
        "time_step_min": 0.9,  # so high that it limits many
    },
    "phi3": _ROPE,
    **{name: {"num_key_value_heads": 4} for name in LATENT},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    model_type: str
    architecture: str
    status: str
    detail: str = ""  # what its layers need, or why it is refused

    @property
    def line(self) -> str:
        detail = self.detail.replace("|", "/").replace("\n", " ")
        return f"| {self.architecture} | {self.model_type} | {self.status} | {detail} |\n"


def model_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """The family's config with few and small layers; of the fields in SMALL those that it has."""
    make = CONFIG_MAPPING[model_type]
    default = make()
    if default.get_text_config() is not default:
        return make(text_config=_small_fields(default.get_text_config(), model_type))
    return make(**_small_fields(default, model_type))


def _small_fields(default: Any, model_type: str) -> dict[str, Any]:
    names = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    fields = {name: value for name, value in SMALL.items() if name in names}
    if kinds := names.get("layer_types"):
        distinct = list(dict.fromkeys(kinds))
        fields["layer_types"] = (distinct * 2)[:2]
    if not names.get("sliding_window") and not names.get("use_sliding_window"):
        fields.pop("sliding_window", None)
    if not names.get("attention_chunk_size"):
        fields.pop("attention_chunk_size", None)
    return {**fields, **OWN.get(model_type, {})}


def try_model(model_type: str) -> Outcome:
    """Run one family; never raises."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(config)
        size = sum(parameter.numel() for parameter in empty.parameters())
        if size > MOST_PARAMETERS:
            return Outcome(model_type, name, NOT_TRIED, f"its smallest has {size:,} parameters")
        model = _make(config)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        return Outcome(model_type, name, NOT_TRIED, f"no tiny config: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:
            return Outcome(model_type, name, NOT_TRIED, f"not saved: {type(error).__name__}")
        try:
            return Outcome(model_type, name, *_compare(model, folder))
        except ModelNotSupported as error:
            reason = str(error).replace(folder, "FOLDER").splitlines()[0][:150]
            return Outcome(model_type, name, REFUSED, reason)
        except Exception as error:
            return Outcome(model_type, name, WRONG, f"{type(error).__name__}: {error}"[:200])


def _make(config: Any) -> Any:
    try:
        return make_model(config)
    except (ValueError, NotImplementedError):  # it has no eager attention to choose
        return AutoModelForCausalLM.from_config(config).eval().float()


def _compare(model: Any, folder: str) -> tuple[str, str]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 250, (PROMPT,), generator=generator).tolist()]
    prompts.append(prompts[0][: PROMPT // 2] + prompts[0][:9])
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    needs: tuple[str, ...] = ()
    status = RIGHT
    for settings in ({"page_size": 1}, {"page_size": 4}, {"page_size": 16}, {"cache": "off"}):
        options: dict[str, Any] = {"num_pages": 512, "chunked_prefill_size": 27, **settings}
        with Runtime(folder, **options) as rt:
            needs = rt.model.attention_features
            status = NATIVE if rt.model.is_native else RIGHT
            for _ in ("cold", "warm"):
                for prompt in prompts:
                    out = rt.generate([prompt], params)[0]
                    _check(model, prompt, out.token_ids, out.logprobs, str(settings))
            rt.check()
    return status, ", ".join(needs)


@torch.inference_mode()
def _check(model: Any, prompt: list[int], answer: Any, logprobs: Any, where: str) -> None:
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    table = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    for at, (token, found) in enumerate(zip(answer, logprobs, strict=True)):
        best, own = float(table[at].max()), float(table[at, token])
        assert best - own <= TIE, f"{where}: token {at} of the answer is another one"
        assert abs(own - found) <= TOLERANCE, f"{where}: log-probability {at} is {found}, not {own}"


def read_page() -> dict[str, tuple[str, str]]:
    """model type -> (status, detail) of the table in docs/models.md."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {
        row[1]: (row[2], row[3]) for row in cells if len(row) == 4 and row[1] in set(model_types())
    }


def write_page(outcomes: list[Outcome]) -> None:
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    order = {NATIVE: 0, RIGHT: 1, REFUSED: 2, NOT_TRIED: 3, WRONG: 4}
    rows = sorted(outcomes, key=lambda one: (order[one.status], one.architecture.lower()))
    counts = {status: sum(one.status == status for one in rows) for status in order}
    table = (
        f"{len(rows)} model types: {counts[NATIVE] + counts[RIGHT]} right, "
        f"{counts[NATIVE]} of them natively; {counts[REFUSED]} refused, "
        f"{counts[NOT_TRIED]} not tried.\n\n"
        "| architecture | model type | outcome | needs, or why not |\n|---|---|---|---|\n"
        + "".join(one.line for one in rows)
    )
    PAGE.write_text(head + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")


def main(chosen: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcomes = []
    for model_type in chosen or model_types():
        outcomes.append(try_model(model_type))
        print(outcomes[-1].line, end="", flush=True)
    if not chosen:
        write_page(outcomes)
    return int(any(one.status == WRONG for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
