"""Looks at the user's reward file without running it: whether it is there, reads as Python, and has the function."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from runner.reward.base import OWN
from runner.spec.suggest import nearest

BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # what may bind a name at the level of the module


def fault(file: Path, function: str) -> str | None:
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


def asked(file: Path, function: str) -> list[str]:
    """The columns that `function` names without a default; none where that cannot be seen (decorated, imported)."""
    node = dict(_bound(ast.parse(file.read_bytes(), filename=str(file)).body)).get(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return []
    plain = [*node.args.posonlyargs, *node.args.args]
    needed = plain[: len(plain) - len(node.args.defaults)]
    needed += [arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed if arg.arg not in OWN]


def _missing(file: Path, function: str, tree: ast.Module) -> str | None:
    bound = dict(_bound(tree.body))
    if function in bound or "*" in bound:
        node = bound.get(function)
        return (
            f"{file}:{node.lineno}: {function} is a class; give a function" if isinstance(node, ast.ClassDef) else None
        )
    functions = [n for n, node in bound.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    meant = nearest(function, functions)
    hint = f"did you mean '{meant}'? " if meant else ""
    has = f"it has: {', '.join(functions)}" if functions else "it has no function"
    return f"{file} has no function '{function}'; {hint}{has}"


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) for each name that these statements bind; `*` stands for an unknown number of them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        elif isinstance(node, BLOCKS):
            yield from _bound([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
            yield from _bound([s for h in getattr(node, "handlers", []) for s in h.body])
        else:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from ((name.id, node) for name in names)
