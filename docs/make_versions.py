"""Writes docs/npu-versions.md and constraints/npu-*.txt from the doctor's table. `make generate` runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runner.tools.doctor.versions import AS_OF, CANN, CPU_BUILD, OLDEST_TORCH, OLDEST_VLLM, PYTHON, SETS, VersionSet

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "npu-versions.md"
HEAD = f"""# Versions on an Ascend NPU

Choose versions of torch, torch_npu and vLLM that fit the CANN of your machine. Take a set with a file of constraints,
and install it as [npu](npu.md#2-python-and-the-versions) shows. Then check it:

```
run doctor device=npu
```

Three rules determine the tables. torch_npu X.Y.Z, with or without a post number, needs torch X.Y.Z. The post number
selects the CANN it was built for, which pip cannot know. vllm-ascend X.Y.Z serves vLLM X.Y.Z.

As of {AS_OF}. `run doctor` reports a version that is in no table as unknown, and does not guess.
Written by `docs/make_versions.py` from `runner/tools/doctor/versions.yaml`; do not edit.
"""
FOOT = f"""
*This project* needs torch {OLDEST_TORCH} or newer, and transformers 5: it spreads experts and exchanges weights by
interfaces that 4.57 does not have, and installs beside vLLM {OLDEST_VLLM} or newer. The sets of older vLLM are listed
because the doctor finds and names them; such a vLLM runs as a server in its own environment
(`sampler=server`), beside a job in the set of the same CANN.

vLLM's own wheel demands another torch than vllm-ascend: `VLLM_TARGET_DEVICE=empty pip install --no-binary vllm
vllm==X`.

torch's CPU build is the one for an NPU; torch has a separate index for these builds; name it to pip with
`--extra-index-url`. On x86_64 torch_npu {", ".join(CPU_BUILD)} demand that build by its name, which no
other index has: `torch==2.10.0+cpu`. On aarch64 the usual torch 2.7.1, 2.9.0 and 2.10.0 are CPU builds; the usual
2.13.0 is for CUDA, and brings gigabytes.

## How far they were checked

Nobody of this project has run any of these sets on a card. Without one, as of {AS_OF}:"""
WHEEL_READ = "torch_npu 2.10.0.post4, Python 3.11, x86_64: the schemas of the operators that we use, its symbols"
FETCHED = "torch_npu's wheels for Python 3.11 and 3.13, aarch64 and x86_64: fetched, their demands read"
CHECKED = (
    ("torch-2.13", "installed on x86_64 with torch's CPU build, without CANN", "the doctor, and training on the CPU"),
    ("torch-2.13", FETCHED, "they demand torch 2.13.0, of any build"),
    (
        "cann-9.0",
        "what pip would install for aarch64, Python 3.11 and 3.13, with what this project depends on (without Hydra)",
        "resolves; conditions on the processor were judged as x86_64, which pip cannot exchange",
    ),
    ("cann-9.0", "the same for x86_64, from the usual index alone", "fails: there is no torch 2.10.0+cpu"),
    (
        "cann-8.3, cann-8.5, cann-9.0",
        "what pip would install for aarch64, Python 3.11, with what this project depends on (without Hydra); "
        "conditions on the processor judged as aarch64",
        "resolves, with transformers 5.23.0; torch without packages for CUDA",
    ),
    (
        "cann-8.3, cann-8.5",
        "torch_npu's wheels for Python 3.11, 3.12, 3.13, aarch64 and x86_64: looked up, for 3.11 fetched, demands read",
        "2.7.1 is there for 3.11, 2.9.0 for 3.11 and 3.12; they demand torch 2.7.1 and 2.9.0, on x86_64 as +cpu",
    ),
    (
        "cann-8.3, cann-9.0",
        "torch of these releases, in a build for CUDA on x86_64, without torch_npu: training on the CPU",
        "the tests of `make test-torch` ([support](support.md))",
    ),
    (
        "cann-8.3, cann-9.0",
        "torch_npu's wheels of 2.7.1 and 2.10.0.post2, aarch64: what they exchange in fully_shard, read",
        "nothing that this project exchanges there, too",
    ),
    ("guides, vllm-ascend-0.11", "vllm-ascend 0.11.0 looked up", "there, as source only"),
    ("cann-9.0, vllm-ascend-0.23", FETCHED, "aarch64: torch 2.10.0; x86_64: torch 2.10.0+cpu"),
    (
        "vllm-ascend-0.23",
        WHEEL_READ,
        "those of 2.13; torch.accelerator does not know its allocator, torch.npu counts memory",
    ),
    ("vllm-ascend-0.23", "what this project depends on, with transformers 5.5.4", "resolves"),
    (
        "vllm-ascend-0.23",
        "vllm-ascend's wheels for Python 3.11, aarch64 and x86_64: fetched; what the engine calls, read",
        "both there (0.23.0; 0.23.0.post1 as source only); its demands are this set's",
    ),
    ("vllm-ascend-0.23", "triton-ascend looked up", "not on the usual index, which ends at 3.2.0"),
    ("the older ones", "torch_npu and vllm-ascend looked up", "there, but for torch_npu 2.7.1.post1"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield from ("", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)))


def row(one: VersionSet) -> list[str]:
    """One set; a dash where nothing is named."""
    cells = [one.torch, one.torch_npu, one.cann, one.vllm, one.vllm_ascend, one.triton_ascend, one.transformers]
    constraints = f"`constraints/{path(one).name}`" if one.usable else "–"
    return [one.name, one.about, *(cell or "–" for cell in cells), constraints]


def page() -> str:
    """The whole page."""
    head = ("set", "what it is", "torch", "torch_npu", "CANN", "vllm", "vllm-ascend", "triton-ascend", "transformers")
    lines = [HEAD, "## Sets", *table((*head, "constraints"), map(row, SETS)), FOOT]
    lines += [*table(("set", "what was done", "result"), CHECKED), ""]
    lines += ["## CANN and torch_npu", *table(("CANN", "torch_npu"), ((c, ", ".join(b)) for c, b in CANN.items()))]
    ranges = ((torch, f"{low} to {high}") for torch, (low, high) in PYTHON.items())
    lines += ["", "## Python", *table(("torch_npu", "Python"), ranges)]
    return "\n".join(lines) + "\n"


def path(one: VersionSet) -> Path:
    """The constraints file of a set."""
    return ROOT / "constraints" / f"npu-{one.name}.txt"


def constraints(one: VersionSet) -> str:
    """The pins of a set, for `pip install -c`."""
    cann = f"CANN {one.cann}" if one.cann else "CANN: not established"
    head = f"# Written by docs/make_versions.py; do not edit. The set {one.name}: {one.about}.\n"
    head += f"# {cann}. Never run on a card by this project.\n"
    return head + "".join(f"{name}=={version}\n" for name, version in one.pins().items())


def files() -> dict[Path, str]:
    """Everything that is written: path → text."""
    return {PAGE: page()} | {path(one): constraints(one) for one in SETS if one.usable}


if __name__ == "__main__":
    for target, text in files().items():
        target.write_text(text, encoding="utf-8")
