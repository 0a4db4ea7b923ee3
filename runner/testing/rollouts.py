"""Checks of rewards, environments, samplers and data."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.build.components import device_op_installer
from runner.build.environments import chat_context
from runner.build.rewards import conversation_encoder
from runner.core.auto_choices import Decisions
from runner.core.batch import pack, with_tokens
from runner.core.errors import RunnerError
from runner.data.config import ChatConfig, DataConfig
from runner.device.config import CpuConfig
from runner.environment.config import EnvironmentConfig
from runner.interfaces import (
    LOGPROBS,
    Completion,
    Data,
    EnvironmentFactory,
    EvalQuestion,
    GenerativeModel,
    Observation,
    Prompt,
    Request,
    Reward,
    Rollout,
    Sampler,
)
from runner.reward.base import RewardConfig
from runner.sampler.base import SamplerConfig
from runner.spec.base import ItemKind
from runner.testing.components import CPU, build_component, build_tiny_model, check_config, require, tiny_tokenizer

Scores = Sequence[float | None]


def completion(text: str, *, prompt: str = "", columns: Mapping[str, Any] | None = None) -> Completion:
    """An answer to a prompt, with the tiny model's token ids, and other columns of the prompt's row."""
    return Completion(_prompt(prompt, columns), _ids(text), text, "stop")


def _prompt(text: str, columns: Mapping[str, Any] | None) -> Prompt:
    return Prompt(_ids(text), text, columns=dict(columns or {}))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False).input_ids)


def check_reward(
    config: RewardConfig, scores: Mapping[str, float | None], *, prompt: str = "", columns: Mapping[str, Any]
) -> None:
    """Check that the reward scores each text alike, whenever and wherever in a group it is scored.

    scores: text → score, None = cannot be scored; columns: of the prompt's row
    """
    check_config(config)
    unknown = [name for _, name in config.required_columns() if name not in columns]
    require(not unknown, f"required_columns() has {', '.join(unknown)}, which the `columns` of this check lack")
    group = [completion(text, prompt=prompt, columns=columns) for text in scores]
    wanted = list(scores.values())
    with tempfile.TemporaryDirectory() as folder:
        reward: Reward = build_component(config, **_reward_context(Path(folder)))
        try:
            _compare_scores(scores, reward.score([group]), [wanted])
            _compare_scores(scores, reward.score([group, group[::-1]]), [wanted, wanted[::-1]])
            require(reward.score([]) == [], "score([]) must be []: a step may leave a rank without a group")
            if config.required_columns():
                _check_missing_columns(reward, [completion(text, prompt=prompt) for text in scores])
        finally:
            reward.close()


def _reward_context(folder: Path) -> dict[str, Any]:
    """The keywords that a job on the CPU gives a reward's factory."""
    decide = Decisions()
    return {
        "device": CPU,
        "tokenizer": tiny_tokenizer(),
        "seed": 0,
        "steps": 100,
        "decide": decide,
        "folder": folder,
        "fit": device_op_installer(build_component(CpuConfig(), decide=decide), decide),
        "make_encoder": partial(conversation_encoder, date=ChatConfig().date),
    }


def _compare_scores(texts: Mapping[str, Any], got: Sequence[Scores], wanted: Sequence[Scores]) -> None:
    shape = "score() returns a list for each group, with a number or None for each of its samples"
    sizes = [len(group) if isinstance(group, list) else None for group in got] if isinstance(got, list) else got
    require(sizes == [len(group) for group in wanted], f"{shape}; got {got!r}")
    for group, expected in zip(got, wanted, strict=True):
        numbers = [value for value in group if value is not None]
        usual = all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
        require(usual, f"{shape}, and no NaN or infinity; got {group!r}")
        same = all(
            one is other if one is None or other is None else math.isclose(one, other, abs_tol=1e-6)
            for one, other in zip(group, expected, strict=True)
        )
        require(same, f"the samples {list(texts)} are to score {list(expected)}, and scored {group}")


def _check_missing_columns(reward: Reward, group: Sequence[Completion]) -> None:
    try:
        scored = reward.score([group])
    except RunnerError:  # nothing could be scored, which ends a run
        return
    text = "without its columns a sample has no score (None), which is not the score 0"
    require(scored == [[None] * len(group)], f"{text}; got {scored}")


def check_environment(
    config: EnvironmentConfig, turns: Sequence[str], *, prompt: str = "", columns: Mapping[str, Any] | None = None
) -> list[Observation]:
    """Check that equal turns give equal, independent episodes; returns the observations of one."""
    check_config(config)
    asked = _prompt(prompt, columns)
    with tempfile.TemporaryDirectory() as folder:
        chat = chat_context(ChatConfig(), tiny_tokenizer())
        made = build_component(config, decide=Decisions(), folder=Path(folder), **chat)
        alone = _episode(made, asked, turns)
        require(_episode(made, asked, turns) == alone, "two episodes with the same turns differ: reset() starts again")
        one, two = made.start_episode(asked), made.start_episode(asked)
        for turn, said in zip(turns, alone, strict=False):
            same = one.step(turn) == said and two.step(turn) == said
            require(same, "two episodes at the same time disturb one another")
    return [said for said in alone if said is not None]


def _episode(made: EnvironmentFactory, prompt: Prompt, turns: Sequence[str]) -> list[Observation | None]:
    """What the environment says to each turn, up to the None that ends the episode."""
    environment, heard = made.start_episode(prompt), list[Observation | None]()
    for turn in turns[: made.max_turns]:
        heard.append(environment.step(turn))
        if heard[-1] is None:
            break
    return heard


def check_sampler(config: SamplerConfig) -> None:
    """Check that a sampler without an engine samples from the tiny model, with its log-probabilities.

    Its raw_logprobs are the model's. Its logprobs, of the distribution that it makes of them, must be possible ones.
    """
    check_config(config)
    require(not config.engine and not config.served, "this check is for samplers that run the trainer's model")
    model = build_tiny_model()
    sampler: Sampler = build_component(config, model=model, decide=Decisions())
    try:
        sampler.load_weights(None, 3)
        prompts = [(5, 6, 7), (5, 6, 7), (5, 6, 7), (5, 6, 7), (9, 10)]
        requests = [Request(ids, seed, 16, len(ids), raw=True) for seed, ids in enumerate(prompts)]
        rollouts = sampler.sample(requests)
        for rollout in rollouts:
            raw = rollout.raw_logprobs or ()
            require(len(raw) == len(rollout.ids), f"raw_logprobs for each id of a request with raw=True; got {rollout}")
            require(max(*rollout.logprobs, *raw) <= 0, f"log-probabilities are not above 0; got {rollout}")
            require(rollout.version == 3, f"version is that of the last load_weights(), 3; got {rollout.version}")
        again = sampler.sample(requests[::-1])[::-1]
        same = [one.ids for one in again] == [one.ids for one in rollouts]
        require(same, "a request's ids depend on its weights, prompt and seed alone, not on the other requests")
        _check_logprobs(sampler, model, requests, rollouts)
        _check_seeds(rollouts[:4])
        prefixed = [name for name in sampler.pop_metrics() if name.startswith("sampler/")]
        require(not prefixed, f"pop_metrics() names metrics without sampler/, which is put before them: {prefixed}")
        sampler.release_memory()
    finally:
        sampler.close()


def _check_logprobs(
    sampler: Sampler, model: GenerativeModel, requests: Sequence[Request], rollouts: Sequence[Rollout]
) -> None:
    rows = [(*r.prompt, *o.ids) for r, o in zip(requests, rollouts, strict=True)]
    wanted = _model_logprobs(model, rows, 1.0)
    for engine in sampler.score(rows):
        require([*map(len, engine)] == [*map(len, wanted)], "score() leaves out each row's first id")
        for row, expected in zip(engine, wanted, strict=True):
            require(_are_close(row, expected), f"score() at temperature 1: the model has {expected}; got {row}")
    tolerance = 1e-3 / min(sampler.temperature, 1)  # rounding of logits, which the temperature divides
    for one, whole in zip(rollouts, _model_logprobs(model, rows, sampler.temperature), strict=True):
        expected, raw = whole[-len(one.ids) :], one.raw_logprobs or ()
        text = f"raw_logprobs at temperature {sampler.temperature}: the model has {expected}; got {[*raw]}"
        require(_are_close(raw, expected, tolerance), text)


@torch.no_grad()
def _model_logprobs(model: GenerativeModel, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
    """What the model computes of all ids of each row but the first."""
    batch, sizes = pack(rows, [[1.0] * len(row) for row in rows]), [len(row) for row in rows]
    model.eval()
    outputs = model.outputs(with_tokens(batch, temperature=torch.full((sum(sizes),), temperature)), LOGPROBS)
    return [row[1:].tolist() for row in torch.split(outputs["logprobs"], sizes)]


def _are_close(numbers: Sequence[float], expected: Sequence[float], tolerance: float = 1e-3) -> bool:
    return all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(numbers, expected, strict=True))


def _check_seeds(rollouts: Sequence[Rollout]) -> None:
    """Rollouts of one prompt differ, unless equal ones are likely by their log-probabilities (top_k=1)."""
    chances = {tuple(one.ids): math.exp(sum(one.logprobs)) for one in rollouts}
    total, (first, chance) = sum(chances.values()), next(iter(chances.items()))
    require(total < 1.001, f"by their logprobs, {len(chances)} different answers have a total probability of {total}")
    likely = chance ** (len(rollouts) - 1) > 1e-6
    require(
        len(chances) > 1 or likely, f"requests with the same prompt and different seeds returned the same ids {first}"
    )


def check_data(config: DataConfig, kind: ItemKind = "sft", *, seed: int = 0) -> Data:
    """Check that items depend on config, seed, step and round alone; returns the data.

    Round 1 is taken of prompts alone, which a step can be refilled with. Where there are 128 different ones, it brings
    others than round 0.
    """
    check_config(config)
    with tempfile.TemporaryDirectory() as folder:
        context = {"tokenizer": tiny_tokenizer(), "seed": seed, "decide": Decisions(), "cache_dir": Path(folder)}
        context |= {"chat": ChatConfig(), "length_limit": None}  # the tiny model's limit is not that of the user's
        data, twin = (build_component(config, **context, kind=kind) for _ in range(2))
        first = list(data.take(0, 3))
        require(len(first) == 3, f"take(0, 3) gives three items, also where that repeats some; got {first}")
        twin.take(7, 2)
        require(list(twin.take(0, 3)) == first, "take(step, count) depends on what was taken before, or on chance")
        require(list(data.take(0, 2)) + list(data.take(1, 2))[:1] == first, "take(step, n) begins at item step·n")
        require(data.fingerprint == twin.fingerprint, "the same data have two fingerprints")
        require(data.prompt_style in ("chat", "text"), f"prompt_style is chat or text, not {data.prompt_style!r}")
        require(data.longest > 0, f"longest is the tokens of the longest item, not {data.longest!r}")
        questions = list(data.held_out_questions())
        require(all(isinstance(q, EvalQuestion) for q in questions), "held_out_questions() gives EvalQuestions")
        if kind == "prompts" and not config.is_stream:
            _check_rounds(data, twin)
        for prompt in first if kind == "prompts" else ():
            unknown = set(prompt.columns) - set(data.columns)
            require(not unknown, f"the property `columns` of the data leaves out {sorted(unknown)}")
            json.dumps(dict(prompt.columns), allow_nan=False)
    return data  # type: ignore[no-any-return]


def _check_rounds(data: Data, twin: Data) -> None:
    """Round 1 has an order of its own, which looks like round 0 with a probability below 1e-4."""
    count = min(len(data), 16)
    again = list(data.take(0, count, 1))
    require(list(twin.take(0, count, 1)) == again, "take(step, count, round=1) depends on earlier calls, or on chance")
    pool = list(data.take(0, min(len(data), 128)))
    if any(row in pool[:at] for at, row in enumerate(pool)):
        return  # equal rows make orders alike
    text = "take(step, count, round=1) must use another order than round 0"
    require(count < 8 or again != pool[:count], f"{text}; got that of round 0")
    known = sum(row in pool[: 2 * count] for row in again)
    text = f"{text}; {known} of its first {count} items are among the first {2 * count} of round 0"
    require(len(pool) < 128 or known <= 12, text)
