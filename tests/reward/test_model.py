"""A trained reward model: a tiny saved sequence classifier, against transformers' own forward pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.interfaces import Completion, Prompt
from runner.interfaces.model import REWARD_MODEL_FILE
from runner.model.tiny import byte_tokenizer
from runner.reward.config import ModelRewardConfig
from tests.reward.samples import made

POSITIONS = 64


def qwen(labels: int = 1, vocabulary: int = 272) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        num_labels=labels,
        pad_token_id=256,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(POSITIONS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward-model")
    Qwen2ForSequenceClassification(qwen()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def completion(
    tokenizer: Any, prompt: str, text: str, end: tuple[int, ...] = (258,), messages: Any = None
) -> Completion:
    return Completion(
        Prompt(tuple(tokenizer(prompt)["input_ids"]), prompt, messages),
        (*tokenizer(text)["input_ids"], *end),
        text,
        "stop",
    )


def reference(folder: Path, ids: list[int]) -> float:
    """One row alone by transformers' own forward, which skips padding at its end."""
    module = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(module(torch.tensor([ids])).logits[0, 0])


def store_position(folder: Path, target: Path, content: str = '{"score_position": "end_of_turn"}') -> Path:
    """A copy of a model's folder that says where its score is."""
    shutil.copytree(folder, target)
    (target / REWARD_MODEL_FILE).write_text(content)
    return target


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_are_those_of_each_row_alone(batch_size: int, trained: Path, tokenizer: Any) -> None:
    texts = [["a", "bc", "a longer answer"], ["x"], [], ["12345", "1"]]
    groups = [[completion(tokenizer, f"question {i}", t) for t in group] for i, group in enumerate(texts)]
    groups[1].append(completion(tokenizer, "q", "ends with padding", end=(256, 256)))
    reward = made(ModelRewardConfig(path=str(trained), batch_size=batch_size), tokenizer=tokenizer)
    found = reward.score(groups)
    expected = [[reference(trained, [*c.prompt.ids, *c.ids]) for c in group] for group in groups]
    assert [len(g) for g in found] == [3, 2, 0, 2]
    flat = [score for group in found for score in group]
    assert flat == pytest.approx([score for group in expected for score in group], abs=1e-5)
    assert len(set(flat)) == 7


def test_the_device_may_exchange_parts_of_the_model_once_it_is_there(trained: Path, tokenizer: Any) -> None:
    seen: list[Any] = []
    made(ModelRewardConfig(path=str(trained)), tokenizer=tokenizer, fit=seen.append)
    [module] = seen
    assert not module.training and not any(p.requires_grad for p in module.parameters())


def test_bfloat16_is_near(trained: Path, tokenizer: Any) -> None:
    group = [completion(tokenizer, "q", "some answer")]
    exact, near = (
        made(ModelRewardConfig(path=str(trained), dtype=dtype), tokenizer=tokenizer).score([group])[0][0]
        for dtype in ("float32", "bfloat16")
    )
    assert exact is not None and near is not None and 0 < abs(exact - near) < 0.1


def test_what_is_too_long_has_no_score(trained: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = made(ModelRewardConfig(path=str(trained)), tokenizer=tokenizer)
    [found] = reward.score([[completion(tokenizer, "q", "x" * 62), completion(tokenizer, "q", "x" * 63)]])
    assert found[0] is not None and found[1] is None
    assert "65 tokens, above the reward model's 64 positions" in caplog.text
    reward.close()
    assert "1 of 2 samples could not be scored: 1 × too long" in caplog.text


QUESTION = ({"role": "user", "content": "2+2?"},)
CHAT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"


@pytest.mark.parametrize("same_vocabulary", [True, False])
@pytest.mark.parametrize("pads_with_end", [True, False])
def test_a_foreign_model_is_read_as_transformers_reads_the_formatted_conversation(
    same_vocabulary: bool, pads_with_end: bool, trained: Path, tmp_path: Path
) -> None:
    """The last token that is no padding, whichever vocabulary the policy has: here the line break."""
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    if pads_with_end:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | {"pad_token_id": 258}))
    policy, decisions = byte_tokenizer(POSITIONS), Decisions(strict=True)
    if not same_vocabulary:
        policy.add_tokens(["<|more|>"])
    reward = made(ModelRewardConfig(path=str(folder)), tokenizer=policy, decide=decisions)
    assert [(d.feature, d.got) for d in decisions.entries] == [("reward.score_position", "last_token")]
    asked = Completion(Prompt((1, 2), "…", QUESTION), (3,), "4", "stop")
    turns = (*QUESTION, {"role": "assistant", "content": "4"})
    whole = Completion(asked.prompt, asked.ids, "unread", "length", messages=turns)
    plain = completion(policy, "2+2?", " 4")
    ids = byte_tokenizer(POSITIONS)(CHAT, add_special_tokens=False)["input_ids"]
    chat, text = reference(folder, ids), reference(folder, [*plain.prompt.ids, *plain.ids])
    assert reward.score([[asked, whole, plain]])[0] == pytest.approx([chat, chat, text], abs=1e-5)
    assert chat != pytest.approx(reference(folder, ids[:-1]), abs=1e-2), "the end token has another score"


def test_a_model_of_this_project_is_read_where_it_was_trained(trained: Path, tokenizer: Any, tmp_path: Path) -> None:
    folder, decisions = store_position(trained, tmp_path / "ours"), Decisions()
    asked = Completion(Prompt((1, 2), "…", QUESTION), (3,), "4", "stop")
    ids = tokenizer(CHAT, add_special_tokens=False)["input_ids"]
    end, line_break = reference(folder, ids[:-1]), reference(folder, ids)

    def score(**options: Any) -> float | None:
        config = ModelRewardConfig(path=str(folder), **options)
        return made(config, tokenizer=tokenizer, decide=decisions).score([[asked]])[0][0]

    assert score() == pytest.approx(end, abs=1e-5)
    assert [(d.got, d.reason) for d in decisions.entries] == [("end_of_turn", "of reward_model.json beside the model")]
    assert score(score_position="last_token") == pytest.approx(line_break, abs=1e-5)
    unread = store_position(trained, tmp_path / "unread", '{"score_position": "middle"}')
    with pytest.raises(EnvironmentProblem, match=r"reward_model.json cannot be read[\s\S]*set reward.score_position"):
        made(ModelRewardConfig(path=str(unread)), tokenizer=tokenizer)


def test_what_cannot_be_formatted_is_said(
    trained: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marked = Completion(Prompt((1, 2), "…", QUESTION), (3,), "4<|im_end|>", "stop")  # as text, not as an end of turn
    refused = Completion(Prompt((1,), "", ({"no": "role"},)), (3,), "4", "stop")
    reward = made(ModelRewardConfig(path=str(trained)), tokenizer=tokenizer)
    [found] = reward.score([[marked, refused]])
    ids = tokenizer(CHAT, add_special_tokens=False)["input_ids"]
    assert found[0] != pytest.approx(reference(trained, ids), abs=1e-5)
    assert found[1] is None and "chat template fails on the conversation" in caplog.text
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    tokenizer_of_policy, decisions = byte_tokenizer(POSITIONS), Decisions()
    tokenizer_of_policy.add_tokens(["<|more|>"])
    reward = made(ModelRewardConfig(path=str(folder)), tokenizer=tokenizer_of_policy, decide=decisions)
    assert "tokenized again with its own tokenizer, as plain text" in [d.got for d in decisions.entries]
    plain = completion(tokenizer, "2+2?", " 4")
    expected = reference(folder, [*plain.prompt.ids, *plain.ids])
    assert reward.score([[plain]])[0][0] == pytest.approx(expected, abs=1e-5)


def test_an_encoder_is_asked_for_its_own_score(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=272, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    module = BertForSequenceClassification(config).eval()
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    group = [completion(tokenizer, "q", text) for text in ("a", "a longer one")]
    decisions = Decisions()
    [found] = made(ModelRewardConfig(path=str(tmp_path)), tokenizer=tokenizer, decide=decisions).score([group])
    with torch.no_grad():
        expected = [float(module(torch.tensor([[*c.prompt.ids, *c.ids]])).logits) for c in group]
    assert found == pytest.approx(expected, abs=1e-5)
    assert not decisions.entries, "no token of the row was chosen"
    with pytest.raises(EnvironmentProblem, match=r"BertForSequenceClassification chooses .*\n.*leave .*position out"):
        made(ModelRewardConfig(path=str(tmp_path), score_position="last_token"), tokenizer=tokenizer)


def test_models_that_are_no_reward_models_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    Qwen2ForSequenceClassification(qwen(labels=2)).save_pretrained(tmp_path)
    with pytest.raises(EnvironmentProblem, match="has 2 labels; a reward model is a sequence classifier"):
        made(ModelRewardConfig(path=str(tmp_path)), tokenizer=tokenizer)
    language_model = Qwen2ForCausalLM(qwen())  # num_labels=1 alone does not make one: its head would be random
    language_model.save_pretrained(tmp_path)
    config = ModelRewardConfig(path=str(tmp_path))
    for refused in (config.preflight, lambda: made(config, tokenizer=tokenizer)):
        with pytest.raises(EnvironmentProblem, match=r"a language model \(Qwen2ForCausalLM\), not.*\n.*algorithm=rm"):
            refused()
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"architectures": None}))
    with pytest.raises(EnvironmentProblem, match=r"lacks 1 of the weights of a reward model, e\.g\. score\.weight"):
        made(config, tokenizer=tokenizer)


def test_an_adapter_of_a_language_model_is_seen_before_anything_is_loaded(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    with pytest.raises(EnvironmentProblem, match=r"a language model \(CAUSAL_LM\), not a sequence classifier"):
        ModelRewardConfig(path=str(tmp_path)).preflight()
    ModelRewardConfig(path=str(trained)).preflight()
    ModelRewardConfig(path="owner/name").preflight()


def test_a_model_without_tokenizer_is_said(tmp_path: Path, trained: Path, tokenizer: Any) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, tmp_path)
    with pytest.raises(EnvironmentProblem, match="the tokenizer has 1 ids, the embedding 272"):
        made(ModelRewardConfig(path=str(tmp_path)), tokenizer=tokenizer)
