"""What `build` makes of a spec where the choice of one group changes another's part."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.build import components
from runner.build.components import (
    build_blank_model,
    build_device,
    build_model,
    build_tokenizer,
    compare_tokenizers,
    report_float32,
)
from runner.build.data import build_data
from runner.build.job import _experience_queue
from runner.build.learners import build_learner
from runner.build.rewards import refuse_missing_columns
from runner.build.samplers import _report_padding
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SpecError, UnsupportedModelError
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.distributed.work_partition import SingleStage
from runner.model.tiny import byte_tokenizer
from runner.parallelism.mesh import Mesh
from tests.inference.model_folders import write_base
from tests.model.zoo import LOGPROBS, batch, causal
from tests.parallelism.worlds import alone


@pytest.mark.parametrize(("algorithm", "learnt"), [("sft", 7), ("cpt", 26)])
def test_continued_pre_training_learns_and_evaluates_every_token(algorithm: str, learnt: int, workdir: Path) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "hello there, general", "completion": "kenobi"}) + "\n")
    words = ["data=file", "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "data.cache=false", "model=tiny"]
    spec = compose_job([*words, f"algorithm={algorithm}"]).spec
    data = build_data(spec, build_tokenizer(spec, Decisions()), Decisions(strict=False))
    [item] = data.take(0, 1)
    [question] = data.held_out_questions()
    assert len(item.ids) == 27, "26 bytes and the end of sequence"
    assert sum(item.weights) == sum(question.item.weights) == learnt


def test_a_model_without_a_head_of_one_number_is_refused_before_its_data_is_read(workdir: Path) -> None:
    Path("rows.jsonl").write_text("not a row")
    spec = compose_job(["algorithm=rm", "model=tiny_vl", "data=file", "data.path=rows.jsonl", "data.cache=false"]).spec
    with pytest.raises(UnsupportedModelError, match="model=tiny_vl has no value head or reward head"):
        build_data(spec, build_tokenizer(spec, Decisions()), Decisions())


@pytest.mark.parametrize(
    ("words", "is_read"), [("rm", True), ("rm algorithm.use_margin=false", False), ("dpo", False), ("simpo", False)]
)
def test_a_margin_column_that_is_not_read_is_reported(words: str, is_read: bool, workdir: Path) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}) + "\n")
    given = ["data=file", "data.path=rows.jsonl", "data.cache=false", "model=tiny"]
    spec, decide = compose_job([*given, *f"algorithm={words}".split()]).spec, Decisions()
    build_data(spec, build_tokenizer(spec, decide), decide)
    said = [str(one) for one in decide.entries if "margin" in str(one)]
    named = "data.rename_columns: not read: margin (only algorithm=rm algorithm.use_margin=true reads it)"
    assert said == ([] if is_read else [named])


def test_variables_of_rows_are_refused_where_an_environment_continues_their_episodes(workdir: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "answer": "b", "chat_template_kwargs": {"x": 1}}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [
        "algorithm=grpo",
        "reward=exact",
        "sampler=torch",
        "data=file",
        "data.path=rows.jsonl",
        "data.cache=false",
        "model=tiny",
    ]
    for environment, refused in (("none", False), ("calculator", True)):
        spec = compose_job([*words, f"environment={environment}", "sampler.max_new_tokens=4"]).spec
        with pytest.raises(DataError, match="chat_template_kwargs: rows with variables") if refused else nullcontext():
            build_data(spec, build_tokenizer(spec, Decisions()), Decisions(strict=False))


REWARD_FILE = """
raise SystemExit("it ran")

def score(completions, level, *, solution, strict=True, **more): ...
"""


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("exact reward.column=answers", [("reward.column", "type reward.column=answer")]),
        ("countdown", [("reward.numbers", "type reward.numbers=NAME"), ("reward.target", "type reward.target=NAME")]),
        ("sum reward.parts=[{name:exact},{name:math,column:x}]", [("reward.parts[1].column", "a column 'x'")]),
        ("function reward.path=mine.py:score", [("reward.path", "'data.rename_columns={NAME: solution}'")]),
        ("numeric", []),
        ("length reward.target=5", []),
    ],
)
def test_a_column_that_no_row_has_is_refused_before_there_is_a_model(
    reward: str, said: list[tuple[str, str]], workdir: Path
) -> None:
    Path("mine.py").write_text(REWARD_FILE)
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "level": 1}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=file", "data.path=rows.jsonl", "model=tiny", "algorithm=grpo", "sampler=torch"]
    spec = compose_job([*words, *f"reward={reward}".split()]).spec
    data = build_data(spec, build_tokenizer(spec, Decisions()), Decisions(strict=False))
    if not said:
        return refuse_missing_columns(spec, data)
    with pytest.raises(SpecError) as raised:
        refuse_missing_columns(spec, data)
    found = raised.value.problems
    assert [p.key for p in found] == [key for key, _ in said]
    for problem, (_, part) in zip(found, said, strict=True):
        assert "columns for rewards: answer, level" in problem.message and part in problem.message


REWARDED = "sampler=torch reward=exact"


@pytest.mark.parametrize(
    ("words", "noisy"),
    [
        ("dpo", False),
        ("dpo algorithm.dropout=true", True),
        ("sft", True),
        (f"grpo {REWARDED}", False),
        (f"grpo {REWARDED} algorithm.dropout=true", True),
        (f"ppo {REWARDED}", False),
        ("opd algorithm.teacher=some/where sampler=torch", False),
    ],
)
def test_what_is_compared_is_learnt_without_the_models_own_dropout_unless_it_is_kept(
    words: str, noisy: bool, workdir: Path
) -> None:
    spec, decide = compose_job(["model=tiny", "data=demo", *f"algorithm={words}".split()]).spec, Decisions(strict=True)
    model = causal("gpt2", attn_pdrop=0.1)
    subject = build_learner(spec, "policy", model, alone(), decide)
    with torch.enable_grad():
        one, two = (subject.model.outputs(batch(), LOGPROBS)["logprobs"] for _ in range(2))
    assert torch.equal(one, two) != noisy
    assert [str(d) for d in decide.entries if d.feature == "algorithm.dropout"] == (
        [] if noisy else ["algorithm.dropout: off (GPT2LMHeadModel has a dropout of up to 0.1)"]
    )


class FirstOfTwo(SingleStage):
    num_stages = 2


def test_each_stage_draws_its_own_dropout_and_the_run_says_so(workdir: Path) -> None:
    spec, decide = compose_job(["model=tiny", "data=demo", "algorithm=sft"]).spec, Decisions()
    model = causal("gpt2", attn_pdrop=0.1)
    model.stage = FirstOfTwo()
    build_learner(spec, "policy", model, alone(), decide)
    assert [str(d) for d in decide.entries if d.feature == "algorithm.dropout"] == [
        "algorithm.dropout: up to 0.1 (each of 2 ranks has its own random stream, so results depend on the number of "
        "ranks)"
    ]


@pytest.mark.parametrize(
    ("words", "lr", "said"),
    [
        ("adapter=none", 1e-5, ["optimizer.lr: 1e-05 (the default with adapter=none)"]),
        ("adapter=lora", 1e-4, ["optimizer.lr: 0.0001 (the default with adapter=lora)"]),
        ("adapter=lora optimizer.lr=3e-5", 3e-5, []),
    ],
)
def test_the_default_learning_rate_is_the_adapters_and_is_reported(
    words: str, lr: float, said: list[str], workdir: Path
) -> None:
    job = ["model=tiny", "data=demo", "algorithm=sft", "schedule=constant", "schedule.warmup_steps=0", *words.split()]
    spec, decide = compose_job(job).spec, Decisions(strict=True)
    learner = build_learner(spec, "policy", causal("qwen2"), alone(), decide)
    learner.begin_step(0)
    assert {group["lr"] for group in learner.optimizer.param_groups} == {lr}
    assert [str(d) for d in decide.entries if d.feature == "optimizer.lr"] == said


def test_dropout_that_nothing_has_cannot_be_kept(workdir: Path) -> None:
    words = ["model=tiny", "data=demo", "algorithm=dpo", "algorithm.dropout=true"]
    spec, decide = compose_job(words).spec, Decisions(strict=True)
    with pytest.raises(SpecError, match=r"algorithm\.dropout: GPT2LMHeadModel has no dropout, and"):
        build_learner(spec, "policy", causal("gpt2"), alone(), decide)


def test_a_critic_that_the_model_cannot_share_is_refused_with_the_way_out(workdir: Path) -> None:
    made = causal("llama4")
    made.save(Path("model"))
    words = ["model=hf", "model.path=model", "data=demo", "algorithm=ppo", *REWARDED.split()]
    spec, decide = compose_job([*words, "algorithm.critic=shared"]).spec, Decisions()
    wanted = r"algorithm\.critic: .* exposes its backbone: Llama4ForCausalLM does not; type algorithm\.critic=separate"
    with pytest.raises(SpecError, match=wanted):
        build_model(spec, made.tokenizer, build_device(spec, decide), decide, spec.algorithm.trained_models()["policy"])


@pytest.mark.parametrize(
    ("sampler", "remedy"), [(("vllm",), "merged"), (("server", "sampler.url=http://localhost:1"), "reload")]
)
def test_an_adapter_of_experts_is_not_sent_alone(sampler: tuple[str, ...], remedy: str) -> None:
    """vLLM ignores it without an error: completions would be those of the base."""
    name, *more = sampler
    words = ["+recipe=grpo_demo", "model=tiny_moe", "init_from=null", f"sampler={name}", *more, "adapter=lora"]
    sync, tokenizer = "sampler.weight_sync=adapter", byte_tokenizer(512)
    with pytest.raises(SpecError, match=rf"experts.*without an error; type sampler\.weight_sync={remedy}"):
        build_blank_model(compose_job([*words, sync]).spec, tokenizer, Decisions())
    for fine in ([f"sampler.weight_sync={remedy}"], [sync, "adapter.targets=[q_proj,v_proj]"]):
        build_blank_model(compose_job([*words, *fine]).spec, tokenizer, Decisions())


def test_a_loaded_adapter_that_vllm_does_not_support_is_not_sent_alone(tmp_path: Path) -> None:
    attach(LoraConfig(dora=True), causal("qwen3"), decide=Decisions()).module.save_pretrained(tmp_path / "adapter")
    causal("qwen3").save(tmp_path / "base")
    own = ["model=hf", f"model.path={tmp_path / 'adapter'}", f"model.base={tmp_path / 'base'}", "init_from=null"]
    words = ["+recipe=grpo_demo", *own, "adapter=lora", "sampler=vllm", "sampler.weight_sync=adapter"]
    with pytest.raises(SpecError, match=r"does not support use_dora of .*adapter; type sampler\.weight_sync=merged"):
        build_blank_model(compose_job(words).spec, byte_tokenizer(512), Decisions())


def test_who_samples_ahead_does_so_on_the_ranks_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA and CANN keep the card that is in use thread by thread, and begin with the machine's first."""
    used: list[tuple[str, int]] = []

    def use(index: int) -> None:
        used.append((threading.current_thread().name, index))

    monkeypatch.setattr(torch.accelerator, "set_device_index", use)
    algorithm: Any = SimpleNamespace(collect=lambda step: step, lag=1, encode=dict, decode=dict)
    models: Any = SimpleNamespace(learners={})
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        with _experience_queue(SimpleNamespace(steps=2), algorithm, None, device, models) as feed:  # type: ignore[arg-type]
            feed.start(0)
            assert [feed.take(step) for step in range(2)] == [0, 1]
    assert {index for _, index in used} == {3} and all(name.startswith("feed") for name, _ in used) and len(used) == 2


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(dp_replicate=2, ep=2)], ids=str)
def test_a_teacher_in_pieces_has_rows_as_the_model_has_them(mesh: Mesh) -> None:
    """Or its micro-batches are others, and ranks that exchange its weights or its tokens wait for one another."""
    padded, packed = causal("gpt_oss"), causal("qwen3_moe")
    world = replace(alone(), mesh=mesh)
    components._check_equal_layouts(packed, packed, world, "teacher")
    components._check_equal_layouts(padded, packed, alone(), "teacher")
    with pytest.raises(SpecError, match=r"algorithm\.teacher uses the padded layout and the model the packed one"):
        components._check_equal_layouts(padded, packed, world, "teacher")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=cuda", "model.dtype=float32"], "at most 1/2 of the peak in bfloat16 (TF32)"),
        (["device=cuda", "model.dtype=float32", "device.tf32=false"], "at most 1/15 of the peak in bfloat16"),
        (["device=npu", "model.dtype=float32"], "about 1/4 of the peak in bfloat16"),
        (["device=cuda"], None),
        (["device=cpu"], None),
    ],
)
def test_a_card_that_computes_in_float32_is_told_what_it_gives_up(words: list[str], said: str | None) -> None:
    decisions = Decisions(strict=True)
    report_float32(compose_job(["+recipe=sft_demo", *words]).spec, decisions)
    facts = [fact["reason"] for fact in decisions.records()["facts"]]
    assert [said in reason for reason in facts] == ([True] if said else [])


def test_memory_that_nobody_wrote_is_not_filled_where_kernels_are_deterministic() -> None:
    """One write of every gather buffer, and more of each temporary."""
    Cpu(CpuConfig(), decide=Decisions()).prepare()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(("vocab_size", "said"), [(512, ["sampler: samples from all 512 ids"]), (259, [])])
def test_ids_that_the_tokenizer_does_not_have_are_sampled_and_said(vocab_size: int, said: list[str]) -> None:
    tokenizer, decide = byte_tokenizer(64), Decisions(strict=True)
    _report_padding(vocab_size, tokenizer, decide)
    assert [str(entry).partition(" (")[0] for entry in decide.entries] == said


def test_a_reference_with_a_path_is_that_model(workdir: Path) -> None:
    """The weights that the job starts from, given by their path, score as their copy does; others score otherwise."""
    words = [
        "algorithm=grpo",
        "algorithm.kl_estimator=k3",
        "sampler=torch",
        "reward=exact",
        "data=demo",
        "model=tiny_half",
    ]

    def reference(more: str, seed: int = 0) -> torch.Tensor:
        spec = compose_job([*words, f"seed={seed}", more]).spec
        decide, tokenizer = Decisions(), build_tokenizer(spec, Decisions())
        device = build_device(spec, decide)
        policy = build_model(spec, tokenizer, device, decide, world=alone())
        if not Path("mine").exists():
            policy.inner.save_pretrained("mine")
            tokenizer.save_pretrained("mine")
        model = components.build_frozen_model(spec, "reference", policy, alone(), decide)
        return model.forward(batch(), LOGPROBS)["logprobs"]

    own = reference("algorithm.reference=copy")
    given = reference("algorithm.reference_path=mine", seed=1)
    assert torch.equal(own, given)
    assert not torch.allclose(own, reference("algorithm.reference=copy", seed=1))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """An export whose chat template is not the one of model=tiny."""
    tokenizer = byte_tokenizer(64)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("\\n", "\\n\\n")
    tokenizer.save_pretrained(tmp_path / "export")
    return tmp_path / "export"


def test_a_template_that_takes_the_place_of_that_of_init_from_is_named(trained: Path) -> None:
    spec = compose_job(["+recipe=sft_demo", f"init_from={trained}"]).spec
    decide = Decisions()
    compare_tokenizers(spec, build_tokenizer(spec, Decisions()), decide)
    assert [entry.feature for entry in decide.entries] == ["chat template"]
    spec = compose_job(
        ["+recipe=sft_demo", f"init_from={trained}", f"chat.template={trained}/chat_template.jinja"]
    ).spec
    compare_tokenizers(spec, build_tokenizer(spec, Decisions()), decide := Decisions())
    assert not decide.entries


def test_a_tokenizer_with_other_ids_than_that_of_init_from_is_refused(trained: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    more = AutoTokenizer.from_pretrained(trained)
    more.add_tokens(["<tool>"])
    more.save_pretrained(trained)
    words = ["+recipe=sft_demo", "model=hf", f"model.path={tmp_path / 'base'}", f"init_from={trained}"]
    spec = compose_job(words).spec
    with pytest.raises(SpecError, match=r"init_from: .* other ids than .*type model\.tokenizer="):
        compare_tokenizers(spec, build_tokenizer(spec, Decisions()), Decisions())
    spec = compose_job([*words, f"model.tokenizer={trained}"]).spec
    compare_tokenizers(spec, build_tokenizer(spec, Decisions()), Decisions())


def test_options_that_init_from_or_a_folder_leaves_without_effect_are_refused(trained: Path) -> None:
    words = ["+recipe=sft_demo", "model=hf", f"model.path={trained}"]
    with pytest.raises(SpecError, match=r"model\.from_scratch: init_from gives the weights"):
        compose_job([*words, "model.from_scratch=true", f"init_from={trained}"])
    with pytest.raises(SpecError, match=r"model\.revision: .* is a folder, which has no revisions"):
        compose_job([*words, "model.revision=main"])
