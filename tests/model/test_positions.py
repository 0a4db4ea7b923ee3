"""How long rows may be: positions that a model has, and frequencies that would depend on the rest of a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.qwen2 import Qwen2Config

from runner.core.batch import pack
from runner.core.errors import SpecError
from runner.model.batch_layout import max_row_length
from runner.model.causal_lm import CausalLM
from tests.model.zoo import LOGPROBS, causal, rows

HALF = 8 // 2  # frequencies of the zoo's head size
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * HALF,
    "long_factor": [3.0] * HALF,
}
CHANGING = [("dynamic", DYNAMIC, 15), ("longrope", LONGROPE, 16)]


def model(rope: dict[str, Any]) -> Any:
    positions = 16 if rope is DYNAMIC else 64
    return causal("llama", max_position_embeddings=positions, rope_parameters=dict(rope))


def test_limits_as_the_configs_say() -> None:
    assert max_row_length(GPT2Config(n_positions=77)) == (77, "the model has 77 positions")
    assert max_row_length(Qwen2Config(max_position_embeddings=99)) == (99, "the model has 99 positions")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    assert max_row_length(Qwen2Config(max_position_embeddings=32, rope_parameters=yarn)) == (
        32,
        "the model has 32 positions",
    )
    config = Qwen2Config(max_position_embeddings=16, rope_parameters={**yarn, "original_max_position_embeddings": 16})
    assert max_row_length(config) == (64, "the model has 64 positions by YaRN")
    by_layer = {"full_attention": dict(DYNAMIC), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(max_position_embeddings=32, rope_parameters=by_layer)
    assert (max_row_length(config) or (0, ""))[0] == 31
    assert max_row_length(causal("bloom").inner.config) is None


def read(subject: CausalLM, ids: list[int]) -> None:
    with subject._generation_mode():
        subject.causal(input_ids=torch.tensor([ids]), use_cache=True)


@pytest.mark.parametrize(("kind", "rope", "limit"), CHANGING)
def test_up_to_the_limit_a_row_does_not_depend_on_what_it_is_with(kind: str, rope: dict[str, Any], limit: int) -> None:
    subject = model(rope)
    short, long, question = rows((5, limit, 40))
    with torch.no_grad():
        read(subject, question)  # it may be longer, and leaves its frequencies behind
        together = subject.outputs(pack([short, long], [[1.0] * 5, [1.0] * limit]), LOGPROBS)["logprobs"]
        read(subject, question)
        alone = subject.outputs(pack([short], [[1.0] * 5]), LOGPROBS)["logprobs"]
    torch.testing.assert_close(together[:5], alone)


@pytest.mark.parametrize(("kind", "rope", "limit"), CHANGING)
def test_beyond_the_limit_it_would_and_is_refused(kind: str, rope: dict[str, Any], limit: int) -> None:
    subject = model(rope)
    short, long = rows((5, 40))
    batch = pack([short, long], [[1.0] * 5, [1.0] * 40])
    with pytest.raises(
        SpecError, match=f"sequences of 40 tokens .* its {kind} positions depend on the longest sequence"
    ):
        subject.outputs(batch, LOGPROBS)
    subject.length_limit = None
    with torch.no_grad():
        together = subject.outputs(batch, LOGPROBS)["logprobs"][:5]
        alone = subject.outputs(pack([short], [[1.0] * 5]), LOGPROBS)["logprobs"]
    assert (together - alone).abs().max() > 1e-3, "or the refusal would be for nothing"


def test_learned_positions_end_where_they_end() -> None:
    subject = causal("gpt2", n_positions=16)
    with pytest.raises(SpecError, match="the model has 16 positions; the maximum is 16"):
        subject.outputs(pack([[1] * 17], [[1.0] * 17]), LOGPROBS)
