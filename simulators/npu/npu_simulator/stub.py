"""Builds what torch_npu takes for CANN's libraries: cann.c, and a do-nothing function for every other symbol it names.

The symbols are read from the wheel, so that the stub fits whichever version it is of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

# The first holds everything; the others are names under which torch_npu looks for it.
SONAMES = ("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
HOME = "cann"  # torch_npu looks for these folders, and for nothing in them
FOLDERS = ("opp", "runtime", "compiler")
LINKED = re.compile(r"(?:acl|rt[A-Z]|Msprof)\w+")
LOOKED_UP = re.compile(r"(?:acl(?:rt|op|md|Get|Init|Fin|Set|Create|Dest|tdt|dump|prof)[A-Za-z0-9]*|Hccl[A-Za-z0-9]*)")

Run = Callable[[Sequence[str]], str]


def build_stub(wheel: Path, source: Path, folder: Path, run: Run) -> None:
    """Write the libraries of SONAMES into `folder`; `run` runs a command and returns what it prints."""
    main = folder / f"{SONAMES[0]}.so"
    flags = ["-O1", "-fPIC", "-shared"]
    run(["gcc", *flags, str(source), "-o", str(main)])
    nothing = sorted(_named(wheel, run) - _symbols(main, "--defined-only", run))
    empty = folder / "nothing.c"
    empty.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in nothing), encoding="utf-8")
    run(["gcc", *flags, f"-Wl,-soname,{main.name}", str(source), str(empty), "-o", str(main)])
    empty.write_text("", encoding="utf-8")
    for name in SONAMES[1:]:
        soname = [f"-Wl,-soname,{name}.so", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
        link = [f"-L{folder}", f"-l{SONAMES[0].removeprefix('lib')}"]
        run(["gcc", *flags, *soname, str(empty), "-o", str(folder / f"{name}.so"), *link])
    empty.unlink()
    for name in FOLDERS:
        (folder / HOME / name).mkdir(parents=True)


def _named(wheel: Path, run: Run) -> set[str]:
    """The functions of CANN that torch_npu links against, or looks up by name while it runs."""
    package = wheel / "torch_npu"
    libraries = [*package.glob("_C*.so"), *(package / "lib" / f"lib{name}.so" for name in ("torch_npu", "tensorpipe"))]
    linked = {name for library in libraries for name in _symbols(library, "--undefined-only", run)}
    texts = run(["strings", str(package / "lib" / "libtorch_npu.so")]).splitlines()
    return set(filter(LINKED.fullmatch, linked)) | set(filter(LOOKED_UP.fullmatch, texts))


def _symbols(library: Path, which: str, run: Run) -> set[str]:
    lines = run(["nm", "-D", which, str(library)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}
