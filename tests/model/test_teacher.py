"""A teacher is another model with the student's ids, and none of it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SecurityError, SpecError
from runner.data.demo_shapes import draw
from runner.model import hf, teacher, tiny
from runner.model.config import HfConfig, TinyConfig
from runner.model.tiny import byte_tokenizer
from tests.model.vision_zoo import write_folder
from tests.model.zoo import CPU, LOGPROBS, batch, causal

LIKE = TinyConfig(lm_head_chunk_tokens=3, batch_layout="padded", dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    causal("qwen3", seed=4).save(tmp_path / "model")
    return tmp_path / "model"


def build(folder: Path | str, tokenizer: Any = None, **options: Any) -> Any:
    students = tokenizer or byte_tokenizer(512)
    given: dict[str, Any] = {"device": CPU, "seed": 0, "decide": Decisions(strict=True), "longest": 64}
    given |= {"like": LIKE, "key": "algorithm.teacher"} | options
    return teacher.build(str(folder), None, given.pop("like"), tokenizer=students, **given)


def test_it_has_its_own_weights_and_runs_as_the_student_does(folder: Path) -> None:
    made, wanted = build(folder), causal("qwen3", seed=4)
    assert made.config.lm_head_chunk_tokens == 3 and made.layout == "padded"
    assert not made.trainable()
    torch.testing.assert_close(
        made.outputs(batch(), LOGPROBS)["logprobs"], wanted.outputs(batch(), LOGPROBS)["logprobs"].detach()
    )


@pytest.mark.parametrize(
    ("students", "dtype", "wanted"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_it_computes_and_is_stored_in_what_the_student_computes_in_or_as_is_asked(
    students: Any, dtype: Any, wanted: torch.dtype, folder: Path
) -> None:
    made = build(folder, like=LIKE.model_copy(update={"dtype": students}), dtype=dtype)
    assert {p.dtype for p in made.module.parameters()} == {wanted}
    assert made.outputs(batch(), LOGPROBS)["logprobs"].dtype == torch.float32


def test_its_hidden_states_and_its_head_are_its_logits(folder: Path) -> None:
    made, data = build(folder), batch()
    found = made.outputs(data, frozenset({"hidden", "logprobs"}))
    logits = made.lm_head()(found["hidden"])
    picked = torch.log_softmax(logits, -1).gather(1, data.tokens["ids"][:, None])[:, 0]
    learnt = data.tokens["parent"] >= 0
    torch.testing.assert_close(picked[learnt], found["logprobs"][learnt])
    assert not found["hidden"][~learnt].any() and not logits.requires_grad


def test_its_weights_are_part_of_where_it_comes_from(folder: Path, tmp_path: Path) -> None:
    causal("qwen3", seed=5).save(tmp_path / "other")
    origins = [build(path).base_fingerprint for path in (folder, tmp_path / "other")]
    assert origins[0]["config"] == origins[1]["config"] and origins[0]["weights"] != origins[1]["weights"]


def test_another_vocabulary_is_refused(folder: Path) -> None:
    more = byte_tokenizer(512)
    more.add_tokens([AddedToken("<new>")])
    with pytest.raises(
        EnvironmentProblem, match=r"algorithm\.teacher=.*1 ids differ, e\.g\. 259 is .* and '<new>' \(student\)"
    ):
        build(folder, more)


def test_another_end_of_answers_is_refused(folder: Path) -> None:
    other = byte_tokenizer(512)
    other.eos_token = "<|im_start|>"
    with pytest.raises(
        EnvironmentProblem, match=r"the teacher's end of sequence is '<\|im_end\|>', the student's is '<\|im_start\|>'"
    ):
        build(folder, other)


def test_a_teacher_that_knows_more_ids_is_welcome(tmp_path: Path) -> None:
    made = causal("qwen3", seed=4)
    made.tokenizer.add_tokens([AddedToken("<new>")])
    made.save(tmp_path / "model")
    assert build(tmp_path / "model").layout == "padded"


def test_rows_that_are_too_long_for_it_are_refused(tmp_path: Path) -> None:
    causal("qwen3", max_position_embeddings=128).save(tmp_path / "model")
    with pytest.raises(SpecError, match="the model has 128 positions"):
        build(tmp_path / "model", longest=1000)


def test_what_is_wrong_with_it_is_said_of_the_teacher(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"algorithm\.teacher=/no/such/folder: no such folder"):
        build("/no/such/folder")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SecurityError, match=r"algorithm\.teacher=.*pickle weights"):
        build(folder)


def test_the_export_of_a_tiny_run_can_teach_a_tiny_one(tmp_path: Path) -> None:
    config = TinyConfig(hidden_size=32, intermediate_size=48, layers=1)
    own = tiny.tokenizer(config)
    tiny.build(config, tokenizer=own, device=CPU, seed=0, decide=Decisions()).save(tmp_path / "export")
    made = build(tmp_path / "export", own)
    assert made.inner.config.hidden_size == 32
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs.get_vocab() == own.get_vocab() and len(theirs) == 259
    assert theirs.special_tokens_map == own.special_tokens_map
    assert theirs.encode("Ünï <|im_end|>\n x") == own.encode("Ünï <|im_end|>\n x")


def test_a_teacher_of_other_pixels_is_refused(tmp_path: Path) -> None:
    folder = write_folder("qwen2_5_vl", tmp_path / "vl")
    config = HfConfig(path=str(folder), dtype="float32")
    students = hf.tokenizer(config)
    reader = students.image_reader = hf.image_reader(config, students, max_pixels=512)
    reader.add(draw(0), several=False)
    assert build(folder, students, like=config).media is not None  # its limits of pixels are the student's
    with pytest.raises(EnvironmentProblem, match="teacher=x reads text alone, but the data has images"):
        teacher.refuse_other_images("x", "algorithm.teacher", None, reader)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.0, 0.0, 0.0]}))
    with pytest.raises(EnvironmentProblem, match=r"image_mean is \[0.0, 0.0, 0.0\] \(teacher\) and \[0.48"):
        build(folder, students, like=config)
