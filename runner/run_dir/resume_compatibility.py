"""What must be equal to resume from a checkpoint, and what must be equal to get the same bits.

spec (all that may not change), data, model   differ ─▶ refused
versions, device                              differ ─▶ said: the curve continues, but not bit for bit
prompt_style                                  how `run infer` has to ask
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any, Literal

from runner import __version__
from runner.core.errors import CheckpointError, DataError, Problem, SpecError
from runner.spec.base import iter_leaves
from runner.spec.job import JobSpec

log = logging.getLogger("runner")

PromptStyle = Literal["chat", "text"]
# What may change when a run continues: how long, on how many devices, how it is watched and kept; nothing that
# the curve so far depends on. Of the sampler: its place, weight transport,
# deadlines and tolerances.
RESUMABLE = (
    "steps", "epochs", "strict", "launch", "parallelism", "evaluation", "watch", "callbacks", "tracker", "checkpoint",
    "sampler.timeout_s", "sampler.sync_logprob_tolerance", "sampler.url",
    "sampler.api_key_env", "sampler.folder", "sampler.retries",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "peft")


def run_identity(
    spec: JobSpec, data: str, style: PromptStyle, model: Mapping[str, str], device: Mapping[str, Any]
) -> dict[str, Any]:
    """The identity of a run, JSON-able.

    data: the fingerprint of the data; model: where the weights come from that no checkpoint holds (`origin`);
    device: what the device says of itself
    """
    versions = {"runner": __version__} | {name: version(name) for name in LIBRARIES}
    return {
        "spec": immutable_fields(spec),
        "data": data,
        "model": dict(model),
        "prompt_style": style,
        **versions,
        **device,
    }


def immutable_fields(spec: JobSpec) -> dict[str, Any]:
    """The part of a spec that is fixed once a run has begun."""
    found = spec.model_dump(mode="json", exclude=set(RESUMABLE))
    for group, name in (key.split(".") for key in RESUMABLE if "." in key):
        found[group].pop(name, None)
    return found


def check_spec_unchanged(spec: JobSpec, saved: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """Raise SpecError naming each fixed option that is not what it was when the checkpoint was written.

    saved: the identity in a checkpoint; free: dotted keys, or groups, that the use at hand may change
    """
    now, before = dict(iter_leaves(immutable_fields(spec))), dict(iter_leaves(saved["spec"]))
    problems = [
        Problem(key, f"was {value} when the checkpoint was written, is {now.get(key)}; put it back", "spec.yaml")
        for key, value in before.items()
        if now.get(key) != value and not {key, key.partition(".")[0]} & {*free, *RESUMABLE}
    ]
    if problems:
        raise SpecError(problems)


def check_model_unchanged(origin: Mapping[str, str], saved: Mapping[str, Any], role: str = "model") -> None:
    """Raise CheckpointError if the model comes from another source than that of the checkpoint."""
    before = saved["model"]
    if changed := [name for name in sorted({*before, *origin}) if before.get(name) != origin.get(name)]:
        raise CheckpointError(
            f"the {role} is not the one that the checkpoint was written for: another {', '.join(changed)} "
            f"({'; '.join(f'{name} was {before.get(name)}, is {origin.get(name)}' for name in changed)})\n"
            "  put the model back that the run began with"
        )


def check_compatible(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise DataError for other data, CheckpointError for another model.

    Other differences are printed, because the run then continues with other bits.
    """
    if now["data"] != saved["data"]:
        raise DataError(
            "the data (or its tokenizer) changed since the checkpoint was written; "
            "restore it, or start a new run from the export of this one"
        )
    check_model_unchanged(now["model"], saved)
    for role, origin in now.get("frozen", {}).items():
        check_model_unchanged(origin, {"model": saved["frozen"][role]}, role)
    differing = {
        k: (saved.get(k), v) for k, v in now.items() if k not in ("spec", "model", "frozen") and saved.get(k) != v
    }
    if differing:
        log.warning(
            "resumed, but not bit for bit: %s", ", ".join(f"{k} was {a}, is {b}" for k, (a, b) in differing.items())
        )
