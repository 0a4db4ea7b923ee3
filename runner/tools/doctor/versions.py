"""Which versions of an NPU's software go together, as versions.yaml says.

The post number of torch_npu selects the CANN it was built for, which pip cannot know. What stands in no row is unknown,
which is said and never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from runner.core.package import read_table

OLDEST_TORCH = Version("2.7.1")  # what this project takes
SAFE_VLLM = Version("0.14")  # the first without the holes that were known then
OLDEST_VLLM, NEWEST_VLLM = Version("0.23"), Version("0.33")  # what sampler=vllm takes, and the newest that it knows

_TABLES: dict[str, Any] = read_table(__file__, "versions.yaml")
AS_OF: str = _TABLES["as_of"]
TORCH_OF_VLLM: dict[str, str] = _TABLES["torch_of_vllm"]
CANN: dict[str, tuple[str, ...]] = {cann: tuple(built) for cann, built in _TABLES["cann"].items()}
PYTHON: dict[str, tuple[str, str]] = _TABLES["python"]
CPU_BUILD: list[str] = _TABLES["cpu_build"]
PACKAGES: dict[str, str] = _TABLES["compiler_packages"]  # of CANN's compiler of operators


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSet:
    """Versions that a publisher lists together; None where none is named or known."""

    name: str
    about: str
    torch: str
    torch_npu: str
    cann: str | None = None
    vllm: str | None = None
    vllm_ascend: str | None = None
    triton_ascend: str | None = None
    transformers: str | None = None

    @property
    def usable(self) -> bool:
        """Whether this project installs beside it."""
        serves = self.vllm is None or Version(self.vllm) >= OLDEST_VLLM
        return serves and Version(self.torch) >= OLDEST_TORCH

    def pins(self) -> dict[str, str]:
        """Distribution → version."""
        named = {
            "torch": self.torch,
            "torch_npu": self.torch_npu,
            "vllm": self.vllm,
            "vllm-ascend": self.vllm_ascend,
            "triton-ascend": self.triton_ascend,
            "transformers": self.transformers,
        }
        return {name: version for name, version in named.items() if version is not None}


SETS = [VersionSet(**one) for one in _TABLES["sets"]]


def release(version: str) -> str:
    """X.Y.Z of a version: `2.13.0+cpu` → 2.13.0, `2.10.0.post4` → 2.10.0; else the text itself."""
    try:
        return ".".join(str(part) for part in Version(version).release)
    except InvalidVersion:
        return version


def same_version(one: str, other: str) -> bool:
    """Whether two spellings mean one version, local parts (+cpu) aside: 8.3.RC1 = 8.3.rc1, 2.10 = 2.10.0."""
    try:
        return Version(one.partition("+")[0]) == Version(other.partition("+")[0])
    except InvalidVersion:
        return one.lower() == other.lower()


def torch_for(torch_npu: str, arch: str) -> str:
    """The torch that this torch_npu demands on a processor of this architecture."""
    torch = release(torch_npu)
    return f"{torch}+cpu" if arch == "x86_64" and torch in CPU_BUILD else torch


def vllm_for(torch: str) -> str | None:
    """The vLLM for CUDA that demands this torch; None = not in the table."""
    return next((vllm for vllm, its in TORCH_OF_VLLM.items() if same_version(release(torch), its)), None)


def cann_for(torch_npu: str) -> list[str]:
    """The CANN versions that this torch_npu is built for; empty = not in the table."""
    return [cann for cann, built in CANN.items() if any(same_version(torch_npu, one) for one in built)]


def torch_npu_for(cann: str) -> tuple[str, ...]:
    """The torch_npu versions built for this CANN, the recommended one first; empty = not in the table."""
    return next((built for known, built in CANN.items() if same_version(cann, known)), ())


def set_of_vllm_ascend(version: str) -> VersionSet | None:
    """The set that a vllm-ascend version belongs to, None where it is in no row."""
    exact = next((s for s in SETS if s.vllm_ascend and same_version(s.vllm_ascend, version)), None)
    return exact or next((s for s in SETS if s.vllm_ascend and release(version) == release(s.vllm_ascend)), None)
