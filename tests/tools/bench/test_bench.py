"""`run bench`: jobs of a few thousand weights beside their baselines, and what is made of the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.cli.args import parse
from runner.cli.job_builder import compose_job
from runner.core.errors import DataError, ParityError, SpecError
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.tools.bench import measure, report, suite
from runner.tools.bench.measure import BaselineLoop, pad_batch
from runner.tools.bench.report import BenchResult
from runner.tools.bench.suite import Case, cases, read_earlier, run_bench

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "head_dim": 8,
}
LORA = ("adapter=lora", "model.gradient_checkpointing=true")
SAMPLING = ("sampler=torch", "sampler.max_new_tokens=8", "reward=length", "reward.target=8")
SMALL = (
    Case("sft", SHAPE, "text", 4, 24, 24, ("model=hf", "algorithm=sft", "algorithm.micro_batch_tokens=48", *LORA)),
    Case("dpo", SHAPE, "pairs", 2, 24, 8, ("model=hf", "algorithm=dpo")),
    Case("grpo", SHAPE, "prompts", 2, 24, 8, ("model=hf", "algorithm=grpo", "algorithm.zero_variance=keep", *SAMPLING)),
)


def jobs(given: tuple[Case, ...], folder: Path, *words: str) -> list[Any]:
    found = []
    for case in given:
        (own := folder / case.name).mkdir()
        found.append((case, compose_job([*case.job(own, 3), "device=cpu", *words]).spec, own))
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, list[str]]:
    said: list[str] = []
    saved: list[int] = []
    result = run_bench(
        jobs(SMALL, tmp_path_factory.mktemp("bench")), said.append, lambda so_far: saved.append(len(so_far.cases))
    )
    assert saved == list(range(1, len(SMALL) + 1)), "what is measured is kept after each case"
    return result, said


def test_the_reference_of_the_baseline_is_stored_as_in_the_job(tmp_path: Path) -> None:
    ((case, spec, folder),) = jobs(SMALL[1:2], tmp_path, "model.dtype=bfloat16")
    case.write(folder)
    loop = BaselineLoop(spec, torch.device("cpu"))
    assert (loop.model.dtype, loop._reference.dtype) == (torch.float32, torch.bfloat16)
    ids = torch.arange(8).view(1, 8)
    assert loop._nll(loop._reference, ids, torch.ones_like(ids)).isfinite().all()


def test_every_case_is_measured_beside_its_baseline(measured: tuple[BenchResult, list[str]]) -> None:
    result, said = measured
    assert [one.name for one in result.cases] == ["sft", "dpo", "grpo"]
    for one in result.cases:
        assert one.skip_reason is None and one.planned_bytes
        assert one.step_s and one.baseline_s and one.ratio == one.baseline_s / one.step_s
        assert one.mfu == pytest.approx(one.flops / one.step_s / result.machine.peak.flops)
        assert one.tokens_per_s == one.tokens / one.step_s
    sft, dpo, grpo = result.cases
    assert sft.tokens == 4 * 24 and dpo.tokens == 2 * (16 + 8 + 8) and grpo.tokens <= 2 * (16 + 8 * 8)
    text = "\n".join(said)
    assert "GB/s for a copy" in text and "speedup" in text and f"{dpo.mfu:.1%}" in text
    assert "decided  export" in text, "what was decided on the way is said"


def test_what_was_measured_is_compared_with_what_was_written(
    measured: tuple[BenchResult, list[str]], tmp_path: Path
) -> None:
    result, _ = measured
    whole = result.as_json()
    for one in whole["cases"]:
        one["tokens_per_s"] /= 2
    (path := tmp_path / "b.json").write_text(json.dumps(whole))
    lines = list(report.format_comparison(result, read_earlier(path)))
    assert len(lines) == 4 and all(" 2.00 " in line for line in lines[1:])
    path.write_text("{}")
    with pytest.raises(DataError, match="a file of run bench"):
        read_earlier(path)


def test_a_bound_on_mfu(measured: tuple[BenchResult, list[str]]) -> None:
    result, _ = measured
    report.check_min_mfu(result, 0.0)
    with pytest.raises(ParityError, match=r"--min-mfu 99.0%: sft"):
        report.check_min_mfu(result, 0.99)


def test_what_a_card_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [(case, spec, folder)] = jobs(SMALL[:1], tmp_path)
    case.write(folder)
    card: Any = SimpleNamespace(torch_device=torch.device("cuda"))
    room = SimpleNamespace(mem_get_info=lambda device: (2**10, 2**30))
    monkeypatch.setattr(torch, "get_device_module", lambda device: room)
    found = measure.measure_case("sft", spec, folder, card, decide=None)  # type: ignore[arg-type]
    assert found.step_s is None and "0.0 GiB are free" in report.format_row(found)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="run bench uses one process"):
        run_bench(jobs(SMALL[:1], tmp_path, "parallelism=ddp", "launch.devices=2"), print, print)


def test_the_environment_is_set_before_anything_can_import_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reached(Exception):
        pass

    def stop(*given: object) -> None:
        raise Reached

    monkeypatch.setattr(suite, "set_environment", stop)
    [(case, spec, folder)] = jobs(SMALL[:1], tmp_path)
    with pytest.raises(Reached):
        run_bench([(case, spec, folder)], print, print)
    assert not (folder / "model").exists(), "whose tokenizer and config transformers writes"


def test_a_baseline_repeats_shared_prompts_and_learns_the_same_tokens() -> None:
    branches = [Branch(ids, {"weight": [1.0] * len(ids)}) for ids in ([7, 8], [9])]
    ids, mask, weight = pad_batch(pack_trees([Tree([1, 2, 3], branches)]))
    assert ids[mask.bool()].tolist() == [1, 2, 3, 7, 8, 1, 2, 3, 9]
    assert weight.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]] and mask.sum(1).tolist() == [5, 4]


@pytest.mark.parametrize("toy", [True, False])
def test_the_jobs_of_a_processor_and_of_a_card_compose(toy: bool, tmp_path: Path) -> None:
    device = "cpu" if toy else "cuda"
    for case in cases(toy):
        spec = compose_job([*case.job(tmp_path, 3), f"device={device}"]).spec
        longest = spec.data.max_length + spec.sampler.answer_tokens()
        assert longest == case.length and spec.algorithm.micro_batch_tokens >= case.length


def test_the_flags_of_the_verb() -> None:
    args = parse(["bench", "device=cpu", "--min-mfu", "20%", "--compare", "a.json"])
    assert (args.words, args.min_mfu, args.compare, args.out) == (["device=cpu"], 0.2, Path("a.json"), None)
