"""An experience as a checkpoint keeps it: what was collected ahead, for the steps after it."""

from __future__ import annotations

from typing import Any

import torch

from runner.algorithm.episodes.rollouts import Drawn, Experience, Group, Outcome, Parts
from runner.protocols import Prompt, State


def encode(experience: Experience) -> State:
    """The experience as a checkpoint keeps it: numbers of tokens in tensors, the rest as JSON."""
    drawn = [s for group in experience.groups for s in group.samples]
    flat = {name: [x for s in drawn for x in getattr(s, name)] for name in ("ids", "mask", "logprobs")}
    groups = [
        {
            "prompt": {
                "ids": list(g.prompt.ids),
                "text": g.prompt.text,
                "messages": None if g.prompt.messages is None else [dict(m) for m in g.prompt.messages],
                "columns": dict(g.prompt.columns),
            },
            "samples": [
                [len(s.ids), s.text, s.finish, s.version, s.reward, [dict(m) for m in s.before], dict(s.parts)]
                for s in g.samples
            ],
        }
        for g in experience.groups
    ]
    tensors = {n: torch.tensor(v, dtype=torch.int64 if n == "ids" else torch.float64) for n, v in flat.items()}
    return {
        "step": experience.step,
        "groups": groups,
        "rounds": experience.rounds,
        "left_out": [[[one.reward, dict(one.parts), one.length, one.finish] for one in g] for g in experience.left_out],
        "tensors": tensors,
    }


def decode(state: State) -> Experience:
    """The inverse of `encode`."""
    rest = {name: iter(tensor.tolist()) for name, tensor in state["tensors"].items()}

    def sample(size: int, text: str, finish: str, version: int, reward: Any, before: Any, parts: Parts) -> Drawn:
        ids, mask, logprobs = (tuple(next(rest[n]) for _ in range(size)) for n in ("ids", "mask", "logprobs"))
        return Drawn(ids, mask, logprobs, text, finish, version, reward, tuple(before), parts)

    groups = []
    for group in state["groups"]:
        one = group["prompt"]
        messages = None if one["messages"] is None else tuple(one["messages"])
        prompt = Prompt(tuple(one["ids"]), one["text"], messages, one["columns"])
        groups.append(Group(prompt, tuple(sample(*s) for s in group["samples"])))
    left_out = tuple(tuple(Outcome(*one) for one in group) for group in state["left_out"])
    return Experience(state["step"], tuple(groups), state["rounds"], left_out)
