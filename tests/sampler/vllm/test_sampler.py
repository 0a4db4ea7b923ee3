"""The vLLM sampler against plain forward passes of the policy, in float32 on the CPU: mean |Δ log-prob.| < 1e-4."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.core.errors import DataError, EnvironmentProblem
from runner.model.causal_lm import CausalLM
from tests.sampler.vllm.engines import (
    HERE,
    LENGTH,
    MEAN,
    NEEDED,
    PROMPTS,
    change,
    engine,
    gap,
    model,
    requests,
    score_gap,
)

pytestmark = NEEDED


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CausalLM, Any]]:
    """A policy, and a sampler with its weights."""
    if not HERE:
        pytest.skip("vLLM is not installed")
    policy = model(tie_word_embeddings=request.param)
    with engine(policy, tmp_path_factory.mktemp("engine"), max_new_tokens=30) as sampler:
        sampler.load_weights(dict(policy.hf_tensors("all")), 7)
        yield policy, sampler


def test_answers_are_drawn_and_reported_as_the_policy_would(pair: tuple[CausalLM, Any]) -> None:
    policy, sampler = pair
    asked = requests(raw=True)
    got = sampler.sample(asked)
    assert gap(policy, asked, got) < MEAN and score_gap(policy, sampler) < MEAN
    assert {one.version for one in got} == {7} and len({tuple(one.ids) for one in got}) > len(PROMPTS)
    assert all(one.raw_logprobs == one.logprobs for one in got)
    for request, one in zip(asked, got, strict=True):
        assert one.finish == ("stop" if one.ids[-1] == 258 else "length")
        assert len(one.ids) == request.max_new_tokens or one.finish == "stop"
    again = sampler.sample(asked)
    assert [one.ids for one in again] == [one.ids for one in got]
    assert [one.ids for one in sampler.sample([replace(one, seed=one.seed + 1) for one in asked])] != [
        one.ids for one in got
    ]


def test_new_weights_are_seen_whole_and_as_what_changed(pair: tuple[CausalLM, Any]) -> None:
    policy, sampler = pair
    before = score_gap(policy, sampler)
    change(policy)
    old = score_gap(policy, sampler)
    sampler.load_weights(dict(policy.hf_tensors("all")), 8)
    assert before < MEAN < old and score_gap(policy, sampler) < MEAN
    change(policy, seed=6)

    class Complete(dict[str, torch.Tensor]):
        changed = frozenset({"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"})

    new = Complete(policy.hf_tensors("all"))
    sampler.load_weights(new, 9)
    partly = score_gap(policy, sampler)
    sampler.load_weights(new, 9)  # once more: then all of it
    assert partly > MEAN > score_gap(policy, sampler)
    asked = requests()
    got = sampler.sample(asked)
    assert gap(policy, asked, got) < MEAN and got[0].version == 9


def test_what_cannot_be_asked_for_is_refused(pair: tuple[CausalLM, Any]) -> None:
    _, sampler = pair
    asked = requests()[0]
    with pytest.raises(DataError, match=f"exceed {LENGTH}"):
        sampler.sample([replace(asked, prompt=(5,) * (LENGTH - 2))])
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.sample([replace(asked, prompt=())])
    with pytest.raises(ValueError, match="cannot score"):
        sampler.score([(5,) * LENGTH])
    with pytest.raises(ValueError, match="its own weights"):
        sampler.load_weights(None, 1)


def test_a_tensor_that_is_not_sent_is_no_secret(pair: tuple[CausalLM, Any]) -> None:
    policy, sampler = pair
    weights = dict(policy.hf_tensors("all"))
    with pytest.raises(EnvironmentProblem, match=r"model\.norm\.weight"):
        sampler.load_weights({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, 1)
    with pytest.raises(RuntimeError, match="no weights"):
        sampler.sample(requests())
    with pytest.raises(EnvironmentProblem, match="does not accept"):
        sampler.load_weights(weights | {"model.layers.9.mlp.up_proj.weight": torch.ones(2)}, 1)
    sampler.load_weights(weights, 11)
    assert score_gap(policy, sampler) < MEAN


def test_an_engine_that_slept_is_woken_and_asks_for_what_it_forgot(pair: tuple[CausalLM, Any]) -> None:
    """On the CPU vLLM's sleep keeps the memory, but not the order of its calls."""
    policy, sampler = pair
    for level in (1, 2):
        sampler._engine._level = level
        sampler.release_memory()
        sampler.release_memory()
        if level == 2:
            with pytest.raises(RuntimeError, match="after sleep=2"):
                sampler.sample(requests())
        change(policy, seed=level)
        sampler.load_weights(dict(policy.hf_tensors("all")), level)
        assert score_gap(policy, sampler) < MEAN and len(sampler.sample(requests())) == len(requests())
    sampler._engine._level = 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        pytest.param(
            {"temperature": 1.7, "stop_token_ids": tuple(range(100)), "max_num_seqs": 3}, marks=pytest.mark.slow
        ),
    ],
)
def test_logprobs_are_those_of_the_temperature(options: dict[str, Any], tmp_path: Path) -> None:
    policy = model("qwen3")
    with engine(policy, tmp_path, **options) as sampler:
        sampler.load_weights(dict(policy.hf_tensors("all")), 0)
        asked = requests()
        got = sampler.sample(asked)
        assert gap(policy, asked, got, options["temperature"]) < MEAN < gap(policy, asked, got)
        assert score_gap(policy, sampler) < MEAN
        assert all(one.raw_logprobs == one.logprobs for one in sampler.sample(requests(raw=True)))
        ends = {258, *options.get("stop_token_ids", ())}
        for one in got:
            assert not ends.intersection(one.ids[:-1]) and (one.finish == "stop") == (one.ids[-1] in ends)
    assert not tmp_path.exists()


def test_nothing_of_the_process_is_changed_and_a_string_ends_an_answer(tmp_path: Path) -> None:
    policy = model()
    torch.set_deterministic_debug_mode("error")
    torch.manual_seed(3), random.seed(3)
    before = torch.get_rng_state().clone(), random.getstate(), torch.set_num_threads, torch.get_num_threads()
    ours = ("VLLM_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")  # and what the presets set
    names = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    groups = dist.is_initialized()  # another test's engine may live
    try:
        with engine(policy, tmp_path, stop=tuple("abcdefghijkl"), top_k=200) as sampler:
            assert {name: value for name, value in os.environ.items() if not name.startswith(ours)} == names
            assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
            assert (torch.set_num_threads, torch.get_num_threads()) == before[2:]
            sampler.load_weights(dict(policy.hf_tensors("all")), 0)
            got = sampler.sample(requests(each=8, length=40))
            assert torch.get_deterministic_debug_mode() == 2
        ends = {policy.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghijkl"}
        letters = [[at for at, token in enumerate(one.ids) if token in ends] for one in got]
        assert any(letters) and all(found in ([], [len(one.ids) - 1]) for found, one in zip(letters, got, strict=True))
        assert all(one.finish == "stop" for found, one in zip(letters, got, strict=True) if found)
        assert dist.is_initialized() == groups
    finally:
        torch.set_deterministic_debug_mode("default")
