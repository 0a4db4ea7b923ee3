"""Names and words of the code: each class once, verbs for functions, no retired word, short first lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "runner").rglob("*.py"))
MAX_FIRST_LINE = 100

PARTICIPLE = re.compile(
    r"_*[a-z]+(?:ed|ept|aid|ought|elt|ade|ound|iven|own|awn|earnt|oken|itten|ozen|osen|aken|ent|old)"
)
# Words that end like a participle and are a noun, an adjective or a verb of the field.
ALLOWED = frozenset({"cached", "current", "environment", "feed", "need", "percent", "seed", "unknown"})
# What these meant is called otherwise now; docs/glossary.md has the terms.
RETIRED = re.compile(
    r"\b(?:(?:un)?learnt|anew|mend(?:s|ed|ing)?|kin|reckon(?:s|ed|ing)?|goes on|go on with|gone on with|going on with|"
    r"lodg(?:ed|er)|shelve[sd]?|seated|hired)\b",
    re.IGNORECASE,
)


parse = cache(ast.parse)  # several tests read the tree of each file


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and string literal, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def retired_words(source: str) -> list[str]:
    return [f"{line}: {word}" for line, text in texts(source) for word in RETIRED.findall(text)]


def bare_participles(source: str) -> list[str]:
    functions = [n for n in ast.walk(parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [(n.lineno, n.name) for n in functions if PARTICIPLE.fullmatch(n.name)]
    return [f"{line}: {name}" for line, name in names if name.lstrip("_") not in ALLOWED]


def long_first_lines(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [
        (getattr(n, "lineno", 1), ast.get_docstring(n)) for n in ast.walk(parse(source)) if isinstance(n, kinds)
    ]
    return [
        f"{at}: {len(line)}" for at, text in documented if text and len(line := text.splitlines()[0]) > MAX_FIRST_LINE
    ]


def classes(source: str) -> list[str]:
    return [n.name for n in ast.walk(parse(source)) if isinstance(n, ast.ClassDef)]


def named_twice(sources: dict[str, str]) -> list[str]:
    """Classes that two places define, with the places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for name in classes(source):
            places[name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


@pytest.fixture(scope="module")
def tree() -> Iterator[dict[str, str]]:
    """The text of each source file, by its path in the package."""
    yield {path.relative_to(ROOT / "runner").as_posix(): path.read_text(encoding="utf-8") for path in SOURCES}
    parse.cache_clear()


def test_no_class_name_means_two_things(tree: dict[str, str]) -> None:
    assert named_twice(tree) == []


@pytest.mark.parametrize("rule", [bare_participles, retired_words, long_first_lines])
def test_the_sources_keep_to(rule, tree: dict[str, str]) -> None:
    found = {name: wrong for name, text in tree.items() if (wrong := rule(text))}
    assert found == {}


def test_the_pages_have_no_retired_word() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in sorted(pages) if page.name not in ("migrate.md", "npu.zh.md")]
    pages += [path for folder in ("conf", "recipes", "runner") for path in sorted((ROOT / folder).rglob("*.yaml"))]
    found = {page.name: words for page in pages if (words := RETIRED.findall(page.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    ("rule", "planted", "fine"),
    [
        (bare_participles, "def _told(): ...", "def cached(): ...\ndef tell(): ...\ndef written_rows(): ..."),
        (retired_words, "x = 'all learnt'", "learnt = 1"),
        (retired_words, "x = 1  # goes on", "x = 1  # continues"),
        (retired_words, 'x = f"{y} anew"', 'x = f"{y} again"'),
        (long_first_lines, f'def f():\n    """{"a" * 101}"""', f'def f():\n    """{"a" * 100}"""'),
    ],
)
def test_a_planted_violation_is_found(rule, planted: str, fine: str) -> None:
    assert len(rule(planted)) == 1
    assert rule(fine) == []


def test_a_class_that_is_named_twice_is_found() -> None:
    assert named_twice({"a.py": "class A: ...", "b.py": "class B:\n    class A: ..."}) == ["A: a.py, b.py"]
