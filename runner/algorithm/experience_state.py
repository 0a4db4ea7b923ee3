"""An experience as a checkpoint keeps it: one that was collected ahead of its step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from runner.algorithm.rollouts import Experience, Group, Outcome, RolloutSample, version_runs
from runner.interfaces import Prompt, State


def _more(sample: RolloutSample) -> tuple[Any, ...]:
    routed = 0 if sample.experts is None else len(sample.experts)
    return version_runs(sample.versions), dict(sample.counts), routed, len(sample.extra_rows)


def encode_experience(experience: Experience) -> State:
    """The experience as a checkpoint keeps it: numbers of tokens in tensors, the rest as JSON."""
    drawn = [row for group in experience.groups for s in group.samples for row in (s, *s.extra_rows)]
    values = attrgetter("text", "finish", "version", "reward")
    flat = {name: np.concatenate([getattr(s, name) for s in drawn]) for name in ("ids", "mask", "logprobs")}
    groups = [
        {
            "prompt": {
                "ids": list(g.prompt.ids),
                "text": g.prompt.text,
                "messages": None if g.prompt.messages is None else [dict(m) for m in g.prompt.messages],
                "columns": dict(g.prompt.columns),
            },
            "samples": [
                [len(s.ids), *values(s), [dict(m) for m in s.history], dict(s.components), s.truncation, *_more(s)]
                for one in g.samples
                for s in (one, *one.extra_rows)
            ],
        }
        for g in experience.groups
    ]
    tensors = {n: torch.from_numpy(v.astype(np.int64 if n == "ids" else np.float64)) for n, v in flat.items()}
    if experts := [s.experts for s in drawn if s.experts is not None]:
        tensors["experts"] = torch.from_numpy(np.concatenate(experts))
    return {
        "step": experience.step,
        "groups": groups,
        "rounds": experience.rounds,
        "left_out": [
            [[one.reward, dict(one.components), one.length, one.finish, dict(one.counts)] for one in g]
            for g in experience.filtered_out
        ],
        "tensors": tensors,
    }


def decode_experience(state: State) -> Experience:
    """The inverse of `encode`."""
    experts_of = iter(state["tensors"].get("experts", ()))
    names, first = ("ids", "mask", "logprobs"), 0
    columns = [array("q" if name == "ids" else "d", state["tensors"][name].numpy().tobytes()) for name in names]

    def samples(lines: Iterator[Sequence[Any]]) -> Iterator[RolloutSample]:
        for line in lines:
            sample, num_rows = read(*line)
            yield replace(sample, extra_rows=tuple(read(*next(lines))[0] for _ in range(num_rows)))

    def read(size: int, *values: Any) -> tuple[RolloutSample, int]:
        nonlocal first
        (ids, mask, logprobs), first = (column[first : first + size] for column in columns), first + size
        text, finish, version, reward, history, components, truncation, *more = values
        defaults: tuple[Any, ...] = ((), {}, 0, 0)  # of what older runs did not write
        runs, counts, routed, num_rows = (*more, *defaults[len(more) :])
        versions = tuple(version for version, count in runs for _ in range(count))
        experts = torch.stack([*islice(experts_of, routed)]).numpy() if routed else None
        own = (text, finish, version, reward, tuple(history), components, truncation, versions, counts, experts)
        return RolloutSample(ids, mask, logprobs, *own), num_rows

    groups = []
    for group in state["groups"]:
        one = group["prompt"]
        messages = None if one["messages"] is None else tuple(one["messages"])
        prompt = Prompt(tuple(one["ids"]), one["text"], messages, one["columns"])
        groups.append(Group(prompt, tuple(samples(iter(group["samples"])))))
    left_out = tuple(tuple(Outcome(*one) for one in group) for group in state["left_out"])
    return Experience(state["step"], tuple(groups), state["rounds"], left_out)
