"""Checks a user's reward before a job starts, without running it and without torch.

Whether a function's file parses and has the function; whether a folder is a reward model whose weights run no code.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.core.errors import EnvironmentProblem, SecurityError
from runner.reward.base import RESERVED_ARGUMENTS
from runner.spec.suggest import nearest_word

BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # what may bind a name at the level of the module


def function_fault(file: Path, function: str) -> str | None:
    """What is wrong with `file` or with `function` in it; None if nothing can be seen."""
    if not file.is_file():
        return f"there is no file {file}; give FILE.py:FUNCTION, e.g. reward.path=my_reward.py:score"
    if file.stem in sys.stdlib_module_names:
        return f"{file} has the name of a module of Python's own ({file.stem}); rename the file"
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: not Python: {error.msg}"
    except (ValueError, OSError) as error:
        return f"{file} cannot be read: {error}"
    return _missing(file, function, tree)


def required_columns(file: Path, function: str) -> list[str]:
    """The columns that `function` names without a default; none where that is unknown (e.g. decorated)."""
    node = dict(_name_bindings(ast.parse(file.read_bytes(), filename=str(file)).body)).get(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return []
    plain = [*node.args.posonlyargs, *node.args.args]
    needed = plain[: len(plain) - len(node.args.defaults)]
    needed += [arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed if arg.arg not in RESERVED_ARGUMENTS]


def _missing(file: Path, function: str, tree: ast.Module) -> str | None:
    bound = dict(_name_bindings(tree.body))
    if function in bound or "*" in bound:
        node = bound.get(function)
        return (
            f"{file}:{node.lineno}: {function} is a class; give a function" if isinstance(node, ast.ClassDef) else None
        )
    functions = [n for n, node in bound.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    meant = nearest_word(function, functions)
    hint = f"did you mean '{meant}'? " if meant else ""
    has = f"it has: {', '.join(functions)}" if functions else "it has no function"
    return f"{file} has no function '{function}'; {hint}{has}"


def _name_bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) for each name that these statements bind; `*` stands for any number of them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        elif isinstance(node, BLOCKS):
            yield from _name_bindings([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
            yield from _name_bindings([s for h in getattr(node, "handlers", []) for s in h.body])
        else:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from ((name.id, node) for name in names)


LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # how their classes are called
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_folder(path: str) -> None:
    """Raise EnvironmentProblem or SecurityRefusal; a hub id, which is not here, passes."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(
                f"reward.path={path}: no such folder; give the folder of a reward model or a hub id"
            )
        return
    if not (folder / "config.json").is_file():
        what = "a PEFT adapter" if (folder / "adapter_config.json").exists() else "no model folder (no config.json)"
        raise EnvironmentProblem(f"reward.path={path} is {what}; give the folder of a whole reward model")
    refuse_language_model(path, json.loads((folder / "config.json").read_text()).get("architectures"))
    if list(folder.glob("*.safetensors")):
        return
    if pickles := sorted(found.name for pattern in PICKLES for found in folder.glob(pattern)):
        raise SecurityError(
            f"reward.path={path} has its weights as pickles ({pickles[0]}), which can run code when loaded\n"
            "  convert them once, where you trust them: "
            "AutoModelForSequenceClassification.from_pretrained(...).save_pretrained(...)"
        )
    raise EnvironmentProblem(f"reward.path={path} holds no weights (*.safetensors)")


def refuse_language_model(path: str, architectures: Sequence[str] | None) -> None:
    """Raise EnvironmentProblem where a model's config says that it writes text."""
    if found := next((name for name in architectures or () if name.endswith(LANGUAGE_MODELS)), None):
        raise EnvironmentProblem(
            f"reward.path={path} is a language model ({found}), not a sequence classifier\n"
            "  make a reward model of it: run algorithm=rm model=hf model.path=… data=… (docs/preference.md)"
        )
