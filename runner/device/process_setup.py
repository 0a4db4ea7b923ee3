"""Set up a process for its device before torch is imported, and import torch."""

from __future__ import annotations

import os
import sys

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.core.imports import import_frozen
from runner.device.device_kinds import NPU
from runner.device.env_presets import npu_objection, resolve_presets
from runner.device.torch_npu_import import hide_torch_npu
from runner.spec.job import JobSpec


def set_environment(spec: JobSpec, decide: Decisions) -> None:
    """Set the variables of the device's presets that the user has not set; the manifest records them.

    A torch_npu that the device has no use for is left out of the process: without CANN it breaks `import torch`.
    Raises EnvironmentProblem if the device cannot work and nobody could see that before, if torch_npu would refuse what
    the user set, or if HCCL's timeouts, the user's and the preset's together, contradict one another.
    """
    if not spec.launch.here:
        spec.device.preflight()
    presets = spec.device.environment(spec)
    found = resolve_presets(presets, dict(os.environ))
    for name, (value, variable) in found.kept.items():
        decide.record_fact(f"environment.{name}", value, f"yours; not {variable.value}: {variable.reason}")
    os.environ.update({name: variable.value for name, variable in found.set.items()})
    if found.set:
        late = "; too late for what torch reads at its import" if "torch" in sys.modules else ""
        words = " ".join(f"{name}={variable.value}" for name, variable in found.set.items())
        decide.record_fact("environment", " + ".join(preset.name for preset in presets), words + late)
    if left_out := hide_torch_npu(spec.device.name, spec.device.kind):
        decide.record_fact("environment.torch_npu", "left out of this process", left_out)
    if spec.device.kind is NPU and (objection := npu_objection(os.environ)):
        raise EnvironmentProblem(f"device={spec.device.name}: {objection}")
    spec.device.enter()


def load_torch(device: str) -> None:
    """Import torch. Raises EnvironmentProblem where it fails, e.g. torch_npu does not fit torch or CANN."""
    try:
        import_frozen("torch")
    except (ImportError, OSError, RuntimeError) as error:
        cause = f"{error} (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else str(error)
        raise EnvironmentProblem(f"import torch fails: {cause}\n  what is wrong: run doctor device={device}") from error
