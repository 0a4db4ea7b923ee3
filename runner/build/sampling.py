"""The sampler of a process that only samples: over a model of its own, which waits for the trainer's weights."""

from __future__ import annotations

from runner.build.parts import build_blank_model, build_device, build_model, build_tokenizer
from runner.build.samplers import collectives_of, made
from runner.callback.activity import Activity
from runner.decisions import Decisions
from runner.folder import RunFolder
from runner.protocols import Sampler
from runner.sampler.remote.backends import Collectives
from runner.spec.job import JobSpec


def build_own_sampler(
    spec: JobSpec, decide: Decisions, folder: RunFolder
) -> tuple[Sampler, Collectives | None, Activity]:
    """The sampler on this process's devices, by what it gets weights over the network, and what watches its device;
    torch's has the weights that the job begins with, an engine none yet."""
    device, tokenizer = build_device(spec, decide), build_tokenizer(spec)
    head = next(iter(spec.algorithm.learners().values()))  # it has the heads of the policy, whose weights it gets
    if spec.sampler.engine:  # which makes its own model of what this one says that it is
        model = build_blank_model(spec, tokenizer, decide, head)
    else:
        model = build_model(spec, tokenizer, device, decide, head)
    activity = Activity(device.readings() if spec.watch.device_s else (), spec.watch.device_s)
    return made(spec, model, decide, folder), collectives_of(spec, device), activity
