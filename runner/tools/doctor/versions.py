"""Which versions of an NPU's software go together: data for the doctor, docs/npu-versions.md and constraints/npu-*.txt.

The post number of torch_npu selects the CANN it was built for, which pip cannot know. What stands in no row is unknown,
which is said and never guessed. Source: the compatibility tables of Ascend/pytorch and vllm-ascend, and the metadata of
the wheels, as of AS_OF.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

AS_OF = "2026-11"
OLDEST_TORCH = Version("2.7.1")  # what this project takes
SAFE_VLLM = Version("0.14")  # the first without the holes that were known then
OLDEST_VLLM, NEWEST_VLLM = Version("0.23"), Version("0.33")  # what sampler=vllm takes, and the newest that it knows

# vLLM's release → the torch that its wheel for CUDA demands, by the wheels' metadata.
TORCH_OF_VLLM = {"0.33.0": "2.14.0", "0.32.0": "2.13.0", "0.23.0": "2.11.0"}

# CANN → the torch_npu versions built for it, the recommended one first.
CANN: dict[str, tuple[str, ...]] = {
    "9.1.0": ("2.10.0.post4", "2.12.0", "2.11.0", "2.9.0.post6", "2.7.1.post8"),
    "9.0.1": ("2.10.0.post2",),
    "9.0.0": ("2.10.0.post2", "2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.1": ("2.9.0",),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC2": ("2.7.1.post1",),
    "8.3.RC1": ("2.7.1", "2.8.0", "2.6.0.post3"),
    "8.2.RC1": ("2.6.0", "2.5.1.post1"),
    "8.1.RC1": ("2.5.1",),
    "8.0.0": ("2.4.0.post2",),
}

# torch's release → the Pythons that torch_npu's wheels of it exist for, both ends included.
PYTHON: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "2.5": ((3, 9), (3, 11)),
    "2.6": ((3, 9), (3, 11)),
    "2.7": ((3, 9), (3, 13)),
    "2.8": ((3, 9), (3, 13)),
    "2.9": ((3, 10), (3, 13)),
    "2.10": ((3, 10), (3, 13)),
    "2.11": ((3, 10), (3, 14)),
    "2.12": ((3, 10), (3, 14)),
    "2.13": ((3, 10), (3, 14)),
}


# Releases of torch whose torch_npu demands, in its wheels for x86_64, torch's CPU build by its name: torch==2.10.0+cpu.
CPU_BUILD = ("2.7.1", "2.8.0", "2.9.0", "2.10.0", "2.11.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSet:
    """Versions that somebody publishes as going together; None where they name none or it is not established."""

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


SETS = (
    VersionSet(
        name="torch-2.13",
        about="the newest torch_npu that this project was tried with, on the CPU; its CANN is not established",
        torch="2.13.0",
        torch_npu="2.13.0",
    ),
    VersionSet(
        name="vllm-ascend-0.23",
        about="the newest vllm-ascend; triton-ascend 3.2.2 comes from Huawei's own index",
        torch="2.10.0",
        torch_npu="2.10.0.post4",
        cann="9.1.0",
        vllm="0.23.0",
        vllm_ascend="0.23.0",
        triton_ascend="3.2.2",
        transformers="5.5.4",
    ),
    VersionSet(
        name="cann-9.0",
        about="CANN 9.0, for training without vLLM",
        torch="2.10.0",
        torch_npu="2.10.0.post2",
        cann="9.0.0",
    ),
    VersionSet(
        name="cann-8.5",
        about="CANN 8.5, for training without vLLM",
        torch="2.9.0",
        torch_npu="2.9.0",
        cann="8.5.0",
    ),
    VersionSet(
        name="cann-8.3",
        about="CANN 8.3, for training; vllm-ascend 0.11 (the set guides) runs as a server, in its own environment",
        torch="2.7.1",
        torch_npu="2.7.1",
        cann="8.3.RC1",
    ),
    VersionSet(
        name="vllm-ascend-0.18",
        about="CANN 8.5",
        torch="2.9.0",
        torch_npu="2.9.0",
        cann="8.5.1",
        vllm="0.18.0",
        vllm_ascend="0.18.0",
    ),
    VersionSet(
        name="vllm-ascend-0.13",
        about="CANN 8.5",
        torch="2.8.0",
        torch_npu="2.8.0.post2",
        cann="8.5.0",
        vllm="0.13.0",
        vllm_ascend="0.13.0",
    ),
    VersionSet(
        name="guides",
        about="the guides of Twinkle and ms-swift",
        torch="2.7.1",
        torch_npu="2.7.1",
        cann="8.3.RC1",
        vllm="0.11.0",
        vllm_ascend="0.11.0rc3",
    ),
    VersionSet(
        name="vllm-ascend-0.11",
        about="CANN 8.3",
        torch="2.7.1",
        torch_npu="2.7.1.post1",
        cann="8.3.RC2",
        vllm="0.11.0",
        vllm_ascend="0.11.0",
    ),
    VersionSet(
        name="vllm-ascend-0.9",
        about="CANN 8.2",
        torch="2.5.1",
        torch_npu="2.5.1.post1",
        cann="8.2.RC1",
        vllm="0.9.1",
        vllm_ascend="0.9.1",
    ),
)


def release(version: str) -> str:
    """X.Y.Z of a version: `2.13.0+cpu` → 2.13.0, `2.10.0.post4` → 2.10.0; the text itself where it is no version."""
    try:
        return ".".join(str(part) for part in Version(version).release)
    except InvalidVersion:
        return version


def same(one: str, other: str) -> bool:
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
    return next((vllm for vllm, its in TORCH_OF_VLLM.items() if same(release(torch), its)), None)


def cann_for(torch_npu: str) -> list[str]:
    """The CANN versions that this torch_npu is built for; empty = not in the table."""
    return [cann for cann, built in CANN.items() if any(same(torch_npu, one) for one in built)]


def torch_npu_for(cann: str) -> tuple[str, ...]:
    """The torch_npu versions built for this CANN, the recommended one first; empty = not in the table."""
    return next((built for known, built in CANN.items() if same(cann, known)), ())


def set_of_vllm_ascend(version: str) -> VersionSet | None:
    """The set that a vllm-ascend version belongs to, None where it is in no row."""
    exact = next((s for s in SETS if s.vllm_ascend and same(s.vllm_ascend, version)), None)
    return exact or next((s for s in SETS if s.vllm_ascend and release(version) == release(s.vllm_ascend)), None)
