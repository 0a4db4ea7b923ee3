"""The sampler of a process that only samples: over a model of its own, which waits for the trainer's weights."""

from __future__ import annotations

from runner.build.parts import build_blank_model, build_device, build_model, build_tokenizer
from runner.build.samplers import made
from runner.decisions import Decisions
from runner.folder import RunFolder
from runner.protocols import Sampler
from runner.spec.job import JobSpec


def build_own_sampler(spec: JobSpec, decide: Decisions, folder: RunFolder) -> Sampler:
    """The sampler on this process's devices; torch's has the weights that the job begins with, an engine none yet."""
    device, tokenizer = build_device(spec, decide), build_tokenizer(spec)
    head = next(iter(spec.algorithm.learners().values()))  # it has the heads of the policy, whose weights it gets
    if spec.sampler.engine:  # which makes its own model of what this one says that it is
        model = build_blank_model(spec, tokenizer, decide, head)
    else:
        model = build_model(spec, tokenizer, device, decide, head)
    return made(spec, model, decide, folder)
