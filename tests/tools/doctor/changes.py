"""Ways to spoil a machine, each a function from a machine to the spoilt one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from runner.tools.doctor.system_info import CommandResult, SystemInfo
from tests.tools.doctor.machines import GOOD, commands, packages, with_environment

Change = Callable[[SystemInfo], SystemInfo]


def installed(**versions: str | None) -> Change:
    """Other versions; None = not installed."""

    def change(machine: SystemInfo) -> SystemInfo:
        kept = {k: v for k, v in (GOOD | {n.replace("_", "-"): v for n, v in versions.items()}).items() if v}
        return dataclasses.replace(machine, packages=packages(**{k.replace("-", "_"): v for k, v in kept.items()}))

    return change


def variables(**values: str) -> Change:
    return lambda machine: with_environment(machine, **values)


def asked(sampler: str | None = None, launch: str | None = None) -> Change:
    """A job is meant to sample or to be launched so."""
    return lambda machine: dataclasses.replace(machine, sampler=sampler, launch=launch)


def without(*names: str) -> Change:
    def change(machine: SystemInfo) -> SystemInfo:
        kept = {name: value for name, value in machine.environment.items() if name not in names}
        return dataclasses.replace(machine, environment=kept)

    return change


def removed(*paths: str) -> Change:
    def change(machine: SystemInfo) -> SystemInfo:
        for path in paths:
            machine.path(path).unlink()
        return machine

    return change


def renamed(path: str, other: str) -> Change:
    def change(machine: SystemInfo) -> SystemInfo:
        machine.path(path).rename(machine.path(other))
        return machine

    return change


def written(path: str, text: str) -> Change:
    def change(machine: SystemInfo) -> SystemInfo:
        machine.path(path).parent.mkdir(parents=True, exist_ok=True)
        machine.path(path).write_text(text)
        return machine

    return change


def both(*changes: Change) -> Change:
    def change(machine: SystemInfo) -> SystemInfo:
        for one in changes:
            machine = one(machine)
        return machine

    return change


def answering(answer: CommandResult) -> Change:
    return lambda machine: dataclasses.replace(machine, run=commands("a2", python=answer))


def built_for(soc: str) -> Change:
    """vllm-ascend's wheel, whose build info names the chip it is for."""

    def change(machine: SystemInfo) -> SystemInfo:
        folder = machine.root / "site"
        (folder / "vllm_ascend").mkdir(parents=True)
        (folder / "vllm_ascend/_build_info.py").write_text(f"# generated\n__device_type__ = '{soc}'\n")
        return dataclasses.replace(machine, site=(folder,))

    return change
