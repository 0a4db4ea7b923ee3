"""Decoder families of transformers, each as a tiny model of random weights, in real jobs.

LoRA fine-tuning, GRPO on all weights, and log-probabilities against transformers, one unpadded row at a time. The limit
is 1e-6, or ten times what transformers' own padded batch differs from its single rows. docs/models.md has the results:

RECORD=1 pytest -n 0 -m slow tests/model/test_families.py        writes them
"""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.signals import StopSignal
from runner.launch.local import check_spec
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.tiny import byte_tokenizer
from runner.run_dir.folder import RunFolder
from runner.trainer.loop import run_loop
from tests.model.zoo import CPU, LOGPROBS, SHAPE, batch, reference, rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = "| family | batch layout | LM head | LoRA | sampling | largest difference | of transformers |"
DATED = re.compile(r"transformers [\d.]+, \d{4}-\d\d-\d\d")
TINY = SHAPE | {"bos_token_id": 257, "max_position_embeddings": 2048}
LIMIT = 1e-6

GPT: dict[str, Any] = {"n_positions": 2048, "n_embd": 32, "n_layer": 2, "n_head": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT = ROUTED | LATENT | {"num_key_value_heads": 4, "head_dim": None}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
SHARED = {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SSM = {"n_groups": 1, "chunk_size": 8}
CONV = {"layer_types": ["conv", "full_attention"]}
PLAIN = (
    "apertus arcee cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 gpt_neox granite hunyuan_v1_dense "
    "llama ministral3 nemotron olmo olmo2 olmo3 opt phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2"
)
FAMILIES: dict[str, dict[str, Any]] = {name: {} for name in PLAIN.split()} | {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": ROUTED,
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "falcon": {"head_dim": None, "ffn_hidden_size": 48},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
    },
    "glm4_moe": ROUTED,
    "glm4_moe_lite": LATENT,
    "gpt2": GPT,
    "gpt_oss": LOCAL | {"sliding_window": 8},
    "gptj": GPT | {"rotary_dim": 4, "n_inner": 48},
    "granitemoe": LOCAL,
    "granitemoehybrid": MAMBA | LOCAL | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "kimi_linear": LATENT
    | {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 2}
    | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "lfm2": CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV | MOE | {"num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "mamba": {"state_size": 8},
    "mamba2": SSM | {"state_size": 8, "num_heads": 8},
    "minimax": LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "minimax_m2": LOCAL,
    "mistral": {"sliding_window": 8},
    "mixtral": LOCAL,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048, "expansion_ratio": 2},
    "nemotron_h": SSM
    | {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8}
    | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3},
    "olmoe": MOE,
    "phimoe": LOCAL,
    "qwen2_moe": MOE | SHARED,
    "qwen3_5_moe_text": MOE | LINEAR | SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_moe": MOE,
    "qwen3_next": MOE | LINEAR | SHARED,
    "recurrent_gemma": {"attention_window_size": 8, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32, "context_length": 2048},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "chunk_size": 8, "mode": "inference"},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
}

JOB = ("model=hf", "tracker=none", "data.items=32", "data.held_out=8", "evaluation.every=0", "checkpoint.best=null")
JOB = (*JOB, "steps=1", "schedule=constant", "schedule.warmup_steps=0")
SFT = ("+recipe=sft_demo", "adapter=lora", "algorithm.batch_size=8")
GRPO = ("+recipe=grpo_demo", "init_from=null", "algorithm.batch_size=2", "algorithm.group_size=8")
GRPO = (*GRPO, "sampler.max_new_tokens=8", "reward=format", "reward.pattern='(?s).*[a-z].*'")


def write_model(family: str, folder: Path) -> Any:
    """A folder of the family with the byte tokenizer; returns its transformers model."""
    options = {name: value for name, value in (TINY | FAMILIES[family]).items() if value is not None}
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    made.eval().save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return made


def padded_logprobs(plain: Any) -> Tensor:
    """What transformers computes of all rows at once, padded on the right, [T]."""
    width = max(map(len, rows()))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows()])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows()])
    found = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits.double().log_softmax(-1)
    picked = found[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat(
        [
            part
            for row, values in zip(rows(), picked, strict=True)
            for part in (values[:0].new_zeros(1), values[: len(row) - 1])
        ]
    )


def logprobs(folder: Path) -> Tensor:
    """What the project computes of all rows, [T], with the model or adapter in a folder."""
    config = HfConfig(path=str(folder))
    model = hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=Decisions())
    return model.outputs(batch(), LOGPROBS)["logprobs"].double()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest one."""
    return float((one - other).abs().max())


def run_job(words: tuple[str, ...], model: Path, folder: Path) -> tuple[Any, Decisions]:
    """Build a job and run its step; returns the model, written to `export` too, and the automatic choices."""
    from runner import build

    spec, decide = check_spec(compose_job([*words, *JOB, f"model.path={model}"]).spec), Decisions()
    folder.mkdir()
    run_folder = RunFolder(folder)
    store = build.build_store(spec, run_folder)
    built = build.build(spec, run_folder, store, decide, StopSignal(), build.OutputSinks())
    run_loop(built.job, 0)
    built.model.save(folder / "export")
    return built.model, decide


def choice(decide: Decisions, feature: str, usual: str) -> str:
    """What was done instead of the usual; see `Decisions`."""
    return next((entry.got for entry in decide.entries if entry.feature == feature and not entry.is_fact), usual)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_trains_samples_and_scores_as_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    plain = write_model(family, folder)
    with torch.no_grad():
        wanted = reference(plain, rows())
        ours = difference(logprobs(folder), wanted)
        theirs = difference(padded_logprobs(plain), wanted)
    limit = max(LIMIT, 10 * theirs)
    assert ours <= limit
    adapted, sft = run_job(SFT, folder, tmp_path / "sft")
    trained, grpo = run_job(GRPO, folder, tmp_path / "grpo")
    for model, export in ((adapted, "sft/export"), (trained, "grpo/export")):
        with torch.no_grad():
            now = model.outputs(batch(), LOGPROBS)["logprobs"].double()
            assert difference(logprobs(tmp_path / export), now) <= limit
            assert difference(now, wanted) > limit
    cells = (choice(sft, "model.batch_layout", "packed"), choice(sft, "lm_head", "chunked"))
    sampling = choice(grpo, "sampler", "continuous batching").partition(":")[0]
    cells = (*cells, choice(sft, "adapter.targets", "all-linear"), sampling)
    row = f"| {family} | {' | '.join(cells)} |"
    if os.environ.get("RECORD"):
        record(family, f"{row} {ours:.1e} | {theirs:.1e} |")
    if f"transformers {transformers.__version__}," in PAGE.read_text():
        assert row in PAGE.read_text()


def record(family: str, row: str) -> None:
    """Write a row into the page's table, with the version and the date."""
    text = DATED.sub(f"transformers {transformers.__version__}, {date.today()}", PAGE.read_text())
    before, head, table = text.partition(HEAD + "\n" + re.sub(r"[^|]+", " --- ", HEAD) + "\n")
    kept = [line for line in table.splitlines() if not line.startswith(f"| {family} |")]
    PAGE.write_text(before + head + "\n".join(sorted([*kept, row])) + "\n")


def test_the_page_has_every_family() -> None:
    table = PAGE.read_text().partition(HEAD)[2]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == sorted(FAMILIES)
