"""Words for what is wrong with a key: what the user probably meant (another framework's word, the same key elsewhere,
the nearest spelling), what a field expects, what it got, and pydantic's errors as sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

# What other frameworks, and people, call our options.
KEYS = {
    **dict.fromkeys(
        ("max_steps", "num_steps", "total_steps", "train_steps", "iterations", "iters", "total_training_steps"), "steps"
    ),
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "num_train_epochs", "total_epochs"), "steps"),
    **dict.fromkeys(("run_name", "experiment_name", "job_name"), "name"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping", "max_norm"), "optimizer.clip_norm"
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "optimizer.betas"),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "epsilon"), "optimizer.eps"),
    **dict.fromkeys(("optim", "optimiser"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type", "lr_schedule"), "schedule"),
    **dict.fromkeys(("warmup", "warmup_ratio", "num_warmup_steps", "warm_up_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("min_lr", "min_lr_ratio", "lr_min", "end_lr"), "schedule.final_ratio"),
    **dict.fromkeys(("lora_rank", "lora_r", "r"), "adapter.rank"),
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    **dict.fromkeys(("lora_target", "lora_targets", "target_modules", "lora_target_modules"), "adapter.targets"),
    "use_dora": "adapter.dora",
    "use_rslora": "adapter.rslora",
    **dict.fromkeys(("peft", "lora"), "adapter"),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "max_len", "seq_len", "seq_length", "cutoff_len", "context_length"),
        "data.max_length",
    ),
    "max_lenght": "data.max_length",
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "dataset_path", "train_file", "train_files"), "data.path"),
    **dict.fromkeys(("eval_dataset", "eval_file", "val_files", "validation_file", "test_file"), "data.eval_path"),
    **dict.fromkeys(
        ("train_batch_size", "per_device_train_batch_size", "global_batch_size", "bs"), "algorithm.batch_size"
    ),
    **dict.fromkeys(
        ("micro_batch_size", "gradient_accumulation_steps", "grad_accum", "max_token_len_per_gpu"),
        "algorithm.micro_batch_tokens",
    ),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "pretrained"), "model.path"),
    **dict.fromkeys(("bf16", "torch_dtype", "precision", "compute_dtype", "autocast"), "model.dtype"),
    "packing": "model.layout",
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpoint", "recompute", "recompute_granularity", "every_n_layers"),
        "model.gradient_checkpointing",
    ),
    "torch_compile": "model.compile",
    **dict.fromkeys(
        ("activation_offload", "offload_activations", "enable_activation_offloading", "activation_cpu_offload"),
        "model.activation_offloading",
    ),
    **dict.fromkeys(("save_steps", "save_freq", "save_every", "save_interval"), "checkpoint.every"),
    **dict.fromkeys(("save_total_limit", "max_to_keep"), "checkpoint.keep"),
    **dict.fromkeys(("metric_for_best_model", "best_metric"), "checkpoint.best"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval", "eval_every"), "evaluation.every"),
    **dict.fromkeys(("num_gpus", "gpus", "nproc_per_node", "n_gpus_per_node", "world_size"), "launch.devices"),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "launch.nodes"),
    **dict.fromkeys(("node_rank", "machine_rank"), "launch.node"),
    **dict.fromkeys(("master_addr", "main_process_ip", "rdzv_endpoint"), "launch.address"),
    **dict.fromkeys(
        ("tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree"),
        "parallelism.tp",
    ),
    **dict.fromkeys(
        ("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel_degree"),
        "parallelism.pp",
    ),
    **dict.fromkeys(("vpp", "vpp_size", "virtual_pipeline_model_parallel_size"), "parallelism.pp_chunks"),
    **dict.fromkeys(
        ("cp_size", "context_parallel_size", "context_parallel_degree", "sp", "sp_size", "sequence_parallel_size"),
        "parallelism.cp",
    ),
    **dict.fromkeys(("ulysses", "ulysses_size", "ulysses_sequence_parallel_size"), "parallelism.cp"),
    **dict.fromkeys(
        ("ep_size", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree"), "parallelism.ep"
    ),
    **dict.fromkeys(("replicate", "data_parallel_replicate_degree"), "parallelism.dp_replicate"),
    **dict.fromkeys(("fsdp_size", "data_parallel_shard_degree"), "parallelism.dp_shard"),
    **dict.fromkeys(("async", "async_save", "async_mode"), "checkpoint.asynchronous"),
    **dict.fromkeys(("report_to", "logger", "wandb"), "tracker"),
    **dict.fromkeys(("project_name", "wandb_project"), "tracker.project"),
    "wandb_mode": "tracker.mode",
}
_CARDS = (
    "a job takes the first cards that it sees; to show it others: ASCEND_RT_VISIBLE_DEVICES=2 run …, "
    "CUDA_VISIBLE_DEVICES for GPUs"
)
ELSEWHERE = {
    "model.autocast": "removed; model.dtype sets the compute data type (bfloat16 or float32); trainable weights stay "
    "in float32",
    **dict.fromkeys(
        ("output_dir", "out_dir", "outputs", "save_dir", "logging_dir"),
        "runs go to ./outputs of the folder you start from; start elsewhere, or make outputs a link",
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "accelerate", "megatron"),
        "several devices: launch.devices=N with one of these: run list parallelism",
    ),
    **dict.fromkeys(
        ("dp", "dp_size", "data_parallel_size"),
        "launch.devices=N counts all ranks, and data-parallel ones are what the other sizes leave: copies "
        "(parallelism=ddp), pieces (parallelism=fsdp), or both (parallelism=hsdp parallelism.dp_replicate=N)",
    ),
    **dict.fromkeys(
        ("rewarders", "launch.rewarders"),
        "each rank scores in reward.workers processes; to score elsewhere: reward=http and a service (docs/rewards.md)",
    ),
    "sequence_parallel": "beside tp there is none; the tokens of rows on several devices: parallelism.cp=N",
    **dict.fromkeys(("visible", "visible_devices", "device_id", "device_ids", "gpu_ids"), _CARDS),
    **dict.fromkeys(("device.id", "device.ids", "device.index", "device.card", "device.rank"), _CARDS),
    **dict.fromkeys(
        ("attn_implementation", "attention_implementation", "attn", "flash_attn", "use_flash_attn", "flash_attention"),
        "the device brings its attention: device.attention=fused or sdpa, on cuda and npu",
    ),
}
_NO_4_BITS = "no base in 4 bits, on any device, and no operator for one on an NPU; LoRA on 16: adapter=lora"
_NO_LIGER = "on an NPU device.fused has CANN's operators in Liger's places; the LM head is chunked on every device"
_NO_FP8 = "no 8 bits here, and an Ascend A2 or A3 has no FP8; model.dtype knows float32 and bfloat16"
_NO_FP16 = (
    "float16 ends at 65,504: gradients and logits overflow without loss scaling, which is not here; type "
    "model.dtype=bfloat16, which has the range of float32 and is as fast"
)
_NO_ENGINE = "the engine that answers are written by is vLLM: sampler=vllm, or sampler=torch without one"
NPU_SIMULATOR = "npu_sim"
ABSENT = {  # what others have and this does not, or not by itself: why, and what to take instead
    NPU_SIMULATOR: "it is a package of its own; in a checkout of this project type: pip install ./simulators/npu",
    **dict.fromkeys(
        ("qlora", "load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bnb"), _NO_4_BITS
    ),
    **dict.fromkeys(("liger", "use_liger", "use_liger_kernel", "liger_kernel"), _NO_LIGER),
    **dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "float8_e5m2", "e4m3", "hifloat8"), _NO_FP8),
    **dict.fromkeys(("fp16", "float16", "half"), _NO_FP16),
    "sglang": _NO_ENGINE,
}
NAMES = {
    "device": {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "huawei": "npu"},
    "adapter": {"full": "none", "null": "none"},
    "tracker": {"null": "none", "off": "none", "tb": "tensorboard", "wb": "wandb"},
    "sampler": {"null": "none"},
    "optimizer": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    },
    "data": {"jsonl": "file", "json": "file", "csv": "file", "parquet": "file", "local": "file", "huggingface": "hub"},
    "model": {"huggingface": "hf", "transformers": "hf", "auto": "hf", "qwen3": "qwen3_0_6b"},
    "algorithm": {"pt": "cpt", "pretrain": "cpt", "finetune": "sft"},
    "launch": {"single": "local"},
    "parallelism": {
        **dict.fromkeys(("null", "none", "off"), "single"),
        **dict.fromkeys(("dp", "zero0"), "ddp"),
        **dict.fromkeys(("zero1", "zero2", "deepspeed_zero1"), "deepspeed_zero2"),
        **dict.fromkeys(("zero3", "full_shard"), "fsdp"),
        **dict.fromkeys(("sp", "ulysses", "ring"), "cp"),
    },
}

_ON_RAY = "Ray takes as many nodes as it needs; leave it out: launch.devices counts the ranks of all of them"
OF_OTHERS = {  # done otherwise
    ("launch", "ray", "nodes"): _ON_RAY,
    ("launch", "ray", "node"): _ON_RAY,
    ("launch", "ray", "folder"): "a job is submitted to a cluster by `ray job submit`, with --folder: docs/launch.md",
}

CLOSEST = 0.85  # a slip of one letter: an option of the component itself is meant, not another's of that very name
MOST_OWNERS = 3  # that are named of those that have an option

# (group, member) → its option names; a group "" holds the top level, and sections that are no group have one member "".
Options = Mapping[str, Mapping[str, Iterable[str]]]


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest in spelling, if any is close."""
    by_lower = {k.lower(): k for k in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def absent(group: str, wrong: str) -> str | None:
    """Why there is no such member of `group`, and what to type instead, if that is known."""
    if group == "device" and re.fullmatch(r"[a-z_]+:\d+", wrong.lower()):
        return _CARDS
    if group == "launch" and (number := re.fullmatch(r"local_?(\d+)", wrong.lower())):
        return f"type launch.devices={number[1]}"
    return ABSENT.get(wrong.lower())


def name(group: str, wrong: str, known: Iterable[str]) -> str | None:
    """The member of `group` that `wrong` probably means."""
    known = list(known)
    other = NAMES.get(group, {}).get(wrong.lower())
    return other if other in known else nearest(wrong, known)


def key(section: str, chosen: str, wrong: str, options: Options) -> str:
    """What to say about the unknown key `section.wrong`: `did you mean 'optimizer.lr'?`; empty if nothing is close.

    `chosen` is the section's chosen member; `options` lists every option there is.
    """
    words = (_join(section, wrong.lower()), wrong.lower())
    if said := next((table[word] for table in (ELSEWHERE, ABSENT) for word in words if word in table), ""):
        return said
    if said := OF_OTHERS.get((section, chosen, wrong.lower()), ""):
        return said
    own = list(options.get(section, {}).get(chosen, ()))
    if wrong.lower() in KEYS and (found := _synonym(section, chosen, wrong, options)):
        return found
    if members := [m for m, names in options.get(section, {}).items() if m and wrong in set(names)]:
        return "an option of " + ", ".join(f"{section}={m}" for m in members)
    if close := nearest(wrong, own, cutoff=CLOSEST):
        return f"did you mean '{close}'?"
    if places := [place for place in options if place != section and _has(options, place, wrong)]:
        return "did you mean " + " or ".join(f"'{_join(p, wrong)}'" for p in places) + "?"
    if close := nearest(wrong, own):
        return f"did you mean '{close}'?"
    anywhere = {n: p for p, members in options.items() for names in members.values() for n in names}
    if close := nearest(wrong, anywhere, cutoff=0.75):
        return f"did you mean '{_join(anywhere[close], close)}'?"
    return ""


def _synonym(section: str, chosen: str, wrong: str, options: Options) -> str:
    target = KEYS[wrong.lower()]
    place, _, leaf = target.rpartition(".")
    members = [m for m, names in options.get(place, {}).items() if leaf in set(names)]
    if not members:
        return ""
    partial = len(members) < len(options[place])  # say which component has it
    shown = [f"{place}={m}" for m in members]
    shown = shown if len(shown) <= MOST_OWNERS else [*shown[:MOST_OWNERS], "…"]
    owners = " of " + " or ".join(shown) if partial else ""
    aside = " (steps = epochs × items / algorithm.batch_size)" if "epoch" in wrong.lower() else ""
    own = place == section and chosen in members
    return f"did you mean '{leaf}'{aside}?" if own else f"did you mean '{target}'{owners}{aside}?"


def _has(options: Options, place: str, leaf: str) -> bool:
    return any(leaf in set(names) for names in options[place].values())


def _join(place: str, leaf: str) -> str:
    return f"{place}.{leaf}" if place else leaf


TYPES = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true/false values"),
    "string": ("a text", "texts"),
    "null": ("null", "nulls"),
    "object": ("a section", "sections"),
}


PATTERNS = {  # in words, where a newcomer meets them
    r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$": "of at most 80 letters, digits, '.', '_' and '-'"
}
SAME = {"bf16": "bfloat16", "fp32": "float32"}  # what people call a choice


def expectation(schema: Mapping[str, Any]) -> str:
    """What a field takes, from its JSON Schema: `a number above 0 or null`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(expectation(option) for option in schema["anyOf"]))
    if "const" in schema:
        return f"'{schema['const']}'"
    if "enum" in schema:
        return "one of " + ", ".join(shown(v, bare=True) for v in schema["enum"])
    if schema.get("type") == "array":
        return _list(schema)
    return " ".join(filter(None, (TYPES.get(str(schema.get("type")), ("a section", ""))[0], limits(schema))))


def span(schema: Mapping[str, Any]) -> str:
    """The values a field takes within its type: `above 0`, `one of a, b`; empty if all."""
    if "anyOf" in schema:
        return "; ".join(filter(None, map(span, schema["anyOf"])))
    if "enum" in schema.get("items", {}):
        return expectation(schema).removeprefix("a list of ")
    return expectation(schema) if "enum" in schema or "const" in schema else limits(schema).removeprefix("that is ")


def limits(schema: Mapping[str, Any]) -> str:
    """The range of a field in words; empty if it has none."""
    low, high = schema.get("minimum"), schema.get("maximum")
    parts = [f"from {low} to {high}"] if low is not None and high is not None else []
    if not parts:
        parts += [f"at least {low}"] if low is not None else []
        parts += [f"above {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
        parts += [f"at most {high}"] if high is not None else []
    parts += [f"below {schema['exclusiveMaximum']}"] if "exclusiveMaximum" in schema else []
    parts += [f"a multiple of {schema['multipleOf']}"] if "multipleOf" in schema else []
    if "pattern" in schema:
        parts.append(PATTERNS.get(schema["pattern"], f"matching {schema['pattern']}"))
    parts += ["that is not empty"] if schema.get("minLength") == 1 else []
    return " and ".join(parts)


def shown(value: Any, bare: bool = False) -> str:
    """A value as it would be typed: `'fast'`, `true`, `null`, `[1, 2]`."""
    if isinstance(value, str):
        return value if bare else f"'{value}'"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def complaint(schema: Mapping[str, Any], key: str, value: Any) -> str:
    """What was expected and what came instead, with the remedy for a number where text is wanted."""
    said = f"expected {expectation(schema)}, got {shown(value)}"
    few = [choice for s in schema.get("anyOf", [schema]) for choice in s.get("enum", ())]
    if isinstance(value, str) and (meant := SAME.get(value.lower())) in few:
        said += f"; did you mean '{meant}'?"
    elif isinstance(value, str) and few and (why := ABSENT.get(value.lower())) is not None:
        said += f"; {why}"
    elif isinstance(value, str) and (close := nearest(value, few)):
        said += f"; did you mean '{close}'?"
    kinds = schema.get("anyOf", [schema])
    wants_text = any(s.get("type") == "string" and not {"enum", "const"} & s.keys() for s in kinds)
    if wants_text and isinstance(value, int | float):
        said += f"; to give it as a text: '{key}=\"{shown(value)}\"'"
    return said


def _list(schema: Mapping[str, Any]) -> str:
    fixed = schema.get("prefixItems")
    items = fixed[0] if fixed else schema.get("items", {})
    choices = ", ".join(shown(choice, bare=True) for choice in items.get("enum", ()))
    kinds = f"some of {choices}" if choices else TYPES.get(str(items.get("type")), ("", "values"))[1]
    count = f"{len(fixed)} " if fixed else "one or more " if schema.get("minItems") == 1 else ""
    return f"a list of {count}{kinds}"
