"""`run new KIND NAME`: write a package in ./NAME that adds a component, with a test.

`pip install ./NAME` installs it. An environment is a file, which needs no package.

KIND ─▶ texts of skeletons.yaml, with the name put in ─▶ NAME/pyproject.toml, NAME/run_NAME.py, NAME/test_run_NAME.py
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from string import Template

from runner.cli.args import UsageError
from runner.core.package import read_table
from runner.spec.suggest import did_you_mean
from runner.tracker.text import print_text

NAME = re.compile(r"[a-z][a-z0-9_]*")
_TABLE = read_table(__file__, "skeletons.yaml")
SKELETONS: dict[str, dict[str, str]] = _TABLE["kinds"]


def create(args: Namespace) -> int:
    """Write the package. Raises UsageError for an unknown kind, an invalid name, or an existing folder."""
    kinds = ", ".join(SKELETONS)
    if len(args.words) != 2:
        raise UsageError(f"run new: expected a kind and a name, e.g. run new reward words ({kinds})")
    kind, name = args.words[0], args.words[1].replace("-", "_")
    if kind not in SKELETONS:
        raise UsageError(f"run new: no kind '{kind}'{did_you_mean(kind, SKELETONS)} ({kinds})")
    if not NAME.fullmatch(name):
        raise UsageError(f"run new: '{name}' is not a valid name; use lowercase letters, digits and _")
    folder = Path(args.words[1])
    if folder.exists():
        raise UsageError(f"run new: {folder} exists; choose another name, or remove it")
    skeleton = SKELETONS[kind]
    texts = {"name": name, "dashed": name.replace("_", "-"), "module": f"run_{name}"}
    texts["Name"] = name.title().replace("_", "")
    files = {"$module.py": skeleton["module"], "test_$module.py": skeleton["test"]}
    if is_package := "entry" in skeleton:
        texts |= {"group": skeleton["group"], "entry": Template(skeleton["entry"]).substitute(texts)}
        files["pyproject.toml"] = _TABLE["project"]
    folder.mkdir()
    for path, text in files.items():
        (folder / Template(path).substitute(texts)).write_text(Template(text).substitute(texts), encoding="utf-8")
    install = f"pip install ./{folder} && " if is_package else ""
    print_text(f"wrote    {folder}\ntest it  {install}python -m pytest {folder}")
    print_text(f"try it   {Template(skeleton['try_it']).substitute(texts)}")
    return 0
