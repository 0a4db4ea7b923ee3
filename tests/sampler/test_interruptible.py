"""Weights that are published while a batch is sampled: the rest of each answer comes from them, as its record says."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.algorithm import experience_state, rollouts
from runner.algorithm.episode import Episode
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.interfaces import Prompt, Request, Rollout
from runner.model.causal_lm import CausalLM
from runner.model.tiny import byte_tokenizer
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import PartitionedSampler
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.trainer.loop import ExperienceQueue
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.transports import DeviceCopy
from tests import command
from tests.command import Command
from tests.launch.several import Job, wait_until
from tests.launch.test_sampled_runs import SMALL
from tests.model.zoo import causal, rows
from tests.parallelism.worlds import on_ranks
from tests.sampler.test_torch import hybrid

PROMPTS = [tuple(row) for row in rows((3, 1, 9, 17))]


class Training:
    """A trainer that publishes another version of its weights whenever it is told to, and remembers all of them."""

    def __init__(self, model: CausalLM, lag: int = 1, **options: Any) -> None:
        self.model, self.copy = model, copy.deepcopy(model)
        self.route = DeviceCopy(lambda: iter(self.model.trainable().items()))
        self.sampler = TorchSampler(TorchSamplerConfig(**options), self.copy, decide=Decisions())
        self.publisher = Publisher(self.route, self.sampler, lag)
        self.sampler.set_weight_source(self.route.newest)
        self.versions: dict[int, CausalLM] = {}
        self.publish()
        self.publisher.load_for(0)

    @torch.no_grad()
    def publish(self) -> None:
        """The next version, by another thread than the one that samples."""
        version = len(self.versions)
        for name, parameter in self.model.trainable().items():
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(version), dtype=parameter.dtype
            )
            parameter += 0.1 * noise * (version > 0 or "lora_B" in name)
        self.versions[version] = copy.deepcopy(self.model)
        thread = threading.Thread(target=self.publisher.publish, args=(version,))
        thread.start()
        thread.join()

    def publish_at(self, *calls: int) -> None:
        """Publish a version before each of these calls of the sampler's model (0-based)."""
        count = iter(range(10**6))
        self.copy.causal.register_forward_pre_hook(lambda *_: self.publish() if next(count) in calls else None)


@torch.no_grad()
def logprobs(versions: Mapping[int, CausalLM], request: Request, rollout: Rollout) -> Tensor:
    """Of each token under the weights of its version, which are given the keys and values of earlier ones."""
    ids, cache, found = [*request.prompt, *rollout.ids], None, []
    first = 0
    end = len(request.prompt) - 1
    for version, tokens in groupby(rollout.versions):
        end += len(list(tokens))
        model = versions[version]
        with model._generation_mode():
            out = model.causal(input_ids=torch.tensor([ids[first:end]]), past_key_values=cache, use_cache=True)
        first, cache = end, out.past_key_values
        found.append(out.logits[0])
    raw = torch.cat(found)[len(request.prompt) - 1 :].log_softmax(-1)
    return raw.gather(1, torch.tensor(rollout.ids)[:, None])[:, 0]


def check(versions: Mapping[int, CausalLM], asked: Sequence[Request], got: Sequence[Rollout], **bounds: float) -> None:
    for request, rollout in zip(asked, got, strict=True):
        assert len(rollout.versions) == len(rollout.ids) and rollout.version == rollout.versions[0]
        wanted = logprobs(versions, request, rollout)
        torch.testing.assert_close(torch.tensor(rollout.logprobs).to(wanted), wanted, **bounds)


def requests(each: int = 3, length: int = 12) -> list[Request]:
    return [
        Request(prompt, seed=100 * group + k, max_new_tokens=length + 5 * k, group=group, raw=True)
        for group, prompt in enumerate(PROMPTS)
        for k in range(each)
    ]


def lora(kind: str) -> CausalLM:
    return attach(LoraConfig(rank=4), causal(kind, double=True), decide=Decisions())


MODELS = {
    "full": lambda: causal("qwen3", double=True),
    "sliding window": lambda: causal("mistral", double=True),
    "merged adapter": lambda: lora("qwen2"),
    "in waves": hybrid,
}


@pytest.mark.parametrize("max_num_seqs", [64, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_the_rest_of_an_answer_comes_from_the_weights_that_are_published_meanwhile(
    kind: str, max_num_seqs: int
) -> None:
    training, asked = Training(MODELS[kind](), max_num_seqs=max_num_seqs), requests()
    training.publish_at(4, 11)
    got = training.sampler.sample(asked)
    check(training.versions, asked, got, atol=1e-4, rtol=1e-4)
    drawn = {version for rollout in got for version in rollout.versions}
    assert drawn == {0, 1, 2} and max(len(set(rollout.versions)) for rollout in got) >= 2
    if max_num_seqs == 5:  # some joined after a switch, though their prompts were computed before it
        assert any(rollout.version > 0 for rollout in got)
    trained, copied = training.model.module.state_dict(), training.copy.module.state_dict()
    assert all(torch.equal(tensor, copied[name]) for name, tensor in trained.items()), "the adapter is out again"


def test_without_newer_weights_it_draws_what_it_always_draws() -> None:
    training, asked = Training(causal("qwen2"), max_num_seqs=5), requests()
    plain = TorchSampler(TorchSamplerConfig(max_num_seqs=5), training.copy, decide=Decisions())
    got = training.sampler.sample(asked)
    for one, other in zip(got, plain.sample(asked), strict=True):
        assert (one.ids, one.logprobs, one.raw_logprobs) == (other.ids, other.logprobs, other.raw_logprobs)
        assert not other.versions and set(one.versions) == {0}


def test_newer_weights_are_loaded_before_the_first_token_and_stay() -> None:
    training = Training(causal("qwen2"), lag=2)
    training.publish()
    training.publish()
    assert {rollout.version for rollout in training.sampler.sample(requests())} == {2}
    training.publisher.load_for(3)  # due to version 1
    assert training.sampler._version == 2


def test_weights_that_a_thread_publishes_at_any_time_are_the_recorded_ones() -> None:
    training, asked = Training(causal("qwen3", double=True), lag=2, max_num_seqs=4), requests(length=6)
    collect = training.publisher.before(lambda step: training.sampler.sample(asked))
    seen = set[int]()
    with ExperienceQueue(collect, 6, 2, encode=lambda _: {}, decode=lambda _: list[Rollout]()) as queue:
        queue.start(0)
        for step in range(6):
            training.publish()
            queue.on_weights_published(step)
            got = queue.take(step)
            check(training.versions, asked, got, atol=1e-4, rtol=1e-4)
            seen |= {version for rollout in got for version in rollout.versions}
            assert min(rollout.version for rollout in got) >= step - 2
    assert len(seen) > 2


def on_a_rank(world: ParallelContext) -> tuple[list[Rollout], bool]:
    training, asked = Training(causal("qwen3", double=True), max_num_seqs=4), requests()
    training.publish_at(3 + 4 * world.place.rank)
    full_params = partial(world.summon_full_params, training.copy)
    sampler = PartitionedSampler(training.sampler, world.rollout_peers, full_params, byte_tokenizer(512))
    got = sampler.sample(asked)
    check(training.versions, asked, got, atol=1e-4, rtol=1e-4)
    return got, training.sampler._version == 1


def test_each_rank_switches_by_itself() -> None:
    (one, switched), (other, also) = on_ranks(2, on_a_rank)
    assert one == other and switched and also
    at = {rollout.versions.index(1) for rollout in one if 1 in rollout.versions[1:]}
    assert len(at) > 1, "not at the same token"


def test_a_sample_says_how_many_tokens_each_version_drew() -> None:
    episode = Episode(Prompt((1, 2), "ab"))
    episode.append_action(Rollout((5, 6, 7), (-1.0,) * 3, (-1.0,) * 3, 3, "stop", (3, 3, 4)), "x")
    sample = rollouts.to_sample(episode, 1.0, {}, shared=2)
    experience = rollouts.Experience(4, (rollouts.Group(episode.prompt, (sample,)),), 1)
    [line] = rollouts.sample_records(experience, rewarded=True, tokenizer=None)
    assert json.loads(json.dumps(line))["versions"] == [[3, 2], [4, 1]] and line["version"] == 3
    found = rollouts.rollout_metrics(experience)
    assert found["rollout/staleness"] == 1.0 and found["rollout/staleness_mean"] == pytest.approx(2 / 3)
    assert experience_state.decode_experience(experience_state.encode_experience(experience)) == experience


REFUSED = {
    "algorithm.lag=0": r"sampler\.interruptible: .*algorithm\.lag=1",
    "algorithm.lag=1 launch.samplers=1": r"sampler\.interruptible: rollout servers .*launch\.samplers=0",
    "algorithm.lag=1 sampler=vllm": "interruptible",
}


@pytest.mark.parametrize("words", REFUSED)
def test_where_nothing_can_switch_it_is_refused(words: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[words]):
        compose_job(["+recipe=grpo_demo", *words.split(), "sampler.interruptible=true"])


INTERRUPTED = (
    *(word for word in SMALL if not word.startswith(("sampler.", "reward.max", "checkpoint."))),
    "algorithm.lag=1",
    "sampler.interruptible=true",
    "sampler.max_new_tokens=48",
    "reward.max_length=48",
    "algorithm.group_size=4",
    "checkpoint.every=3",
)


@pytest.mark.timeout(300)
def test_killed_it_continues_with_the_completions_of_its_journal(tmp_path: Path) -> None:
    job = Job(tmp_path)
    process = Command(*INTERRUPTED, "steps=8", cwd=tmp_path, printed=job.printed, hold_at=6)
    wait_until(lambda: job.steps() >= 5, process)
    process.kill()
    process.wait()
    before = {row["step"]: row for row in job.curve()}
    journal = {path.name: path.read_bytes() for path in (job.latest / "journal").iterdir()}
    assert max(before) >= 5 and any(b'"versions"' in content for content in journal.values())
    command.run("resume", "latest", cwd=tmp_path)
    after = {row["step"]: row for row in job.curve()}
    assert sorted(after) == list(range(1, 9))
    assert [after[step] for step in before] == list(before.values()), "steps that are repeated have the same numbers"
    mean, oldest = ([row[f"rollout/{name}"] for row in after.values()] for name in ("staleness_mean", "staleness"))
    assert all(a <= b for a, b in zip(mean, oldest, strict=True)) and sum(mean) < sum(oldest)
