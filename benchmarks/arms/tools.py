"""Episodes whose tools take 1 to 300 ms, beside the same requests at once: what waiting for tools costs the sampler.

    python -m arms.tools RESULT EPISODES ROUNDS

A random model of 1 million parameters, 64 answers at once. Each episode has four turns, and its tool sleeps between
them. The other arm gives the requests of these episodes, of which all prompts are known by then, to the same sampler.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from arms.sampler import random_model
from runner.algorithm.rollouts import RolloutCollector
from runner.build.environments import EnvironmentBuilder, build_extend
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.environment.config import FunctionEnvironmentConfig
from runner.interfaces import Prompt, Request, Rollout
from runner.interfaces.sampling import RequestSource
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler

TURNS, BATCH, NEW = 4, 64, 128
ENDS = tuple(range(12))  # ids that end a turn
TOOL = """
import asyncio, random

async def respond(messages):
    await asyncio.sleep(random.Random(len(str(messages))).uniform(0.001, 0.3))
    return "go on"
"""


class RecordingSampler:
    """The sampler, which keeps the requests that it gets, and the tokens that it returns."""

    def __init__(self, inner: TorchSampler) -> None:
        self.inner, self.requests, self.tokens = inner, list[Request](), 0
        self.temperature, self.max_new_tokens, self.max_model_len = inner.temperature, NEW, inner.max_model_len

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`."""
        return self.inner.sample(requests)

    def sample_continuously(self, source: RequestSource) -> None:
        """See `ContinuousSampler`."""
        self._source = source
        self.inner.sample_continuously(self)

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        """See `RequestSource`."""
        taken = self._source.take(wait)
        self.requests += [request for _, request in taken]
        return taken

    def answer(self, number: int, rollout: Rollout) -> None:
        """See `RequestSource`."""
        self.tokens += len(rollout.ids)
        self._source.answer(number, rollout)


def main(result: Path, episodes: int, rounds: int) -> None:
    """A warm-up, then A B A B …; writes seconds and tokens of all rounds."""
    model, decide = random_model("1 M"), Decisions()
    config = TorchSamplerConfig(max_num_seqs=BATCH, max_new_tokens=NEW, stop_token_ids=ENDS)
    sampler, chance = TorchSampler(config, model, decide=decide), random.Random(0)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder, "tool.py")
        tool.write_text(TOOL)
        environment = FunctionEnvironmentConfig(path=f"{tool}:respond", max_turns=TURNS, workers=episodes)
        spec = compose_job(["+recipe=grpo_demo"]).spec.model_copy(update={"environment": environment})
        builder = EnvironmentBuilder(model.tokenizer, decide, None)
        environments = builder.build(spec, SINGLE_PROCESS)
        extend = build_extend(spec, model.tokenizer, environments, decide)
        prompts = []
        for _ in range(episodes):
            messages = ({"role": "user", "content": "x" * chance.randint(1, 64)},)
            ids = model.tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)
            prompts.append(Prompt(tuple(ids), messages[0]["content"], messages))
        for _ in range(1 + rounds):
            recorder = RecordingSampler(sampler)
            collector = RolloutCollector(recorder, None, model.tokenizer, 0, 1, environments, extend)
            begin = time.monotonic()
            collector.collect_groups(prompts, 0, 0)
            middle = time.monotonic()
            alone = sum(len(rollout.ids) for rollout in sampler.sample(recorder.requests))
            engine_s = time.monotonic() - middle
            measured.append(
                {
                    "episodes": {"wall_s": middle - begin, "tokens": recorder.tokens},
                    "engine": {"wall_s": engine_s, "tokens": alone},
                }
            )
        builder.close()
    result.write_text(json.dumps(measured[1:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
