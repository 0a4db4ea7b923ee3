"""The pages that people write: commands can be typed, lines and bullets are short, options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import yaml

from runner.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"reference.md", "migrate.md", "npu-versions.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in GENERATED)]
COMMAND = re.compile(r"(?:\$ |[A-Z_]+=\S+ )*(?:run|pip|make|python3?|docker|source|git|ray|srun|torchrun|wandb)\s")
MAX_LINE, MAX_BULLET_WORDS = 160, 40
EARLY = 30  # lines within which a page shows its first command
OPTION = re.compile(r"(?<![\w.@/])([a-z]+)\.([a-z]\w*)=")
WRONG_ON_PURPOSE = {"data.max_lenght", "optimizer.lrr"}  # what a page shows the error of
CODE_PAGES = {"architecture", "where-to-change"}  # which name files of the project
JOB = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*run (?:plan )?((?:-m |\S*=).*)")
WRITTEN = ("here/recipes/mine.yaml", "here/recipes/my_search.yaml", "exp/mine.yaml")  # by the reader of a page
STATES = {"✓", "●", "○", "–"}


def lines(page: Path) -> Iterator[tuple[int, str, str]]:
    """Number, kind and text of each line; the kinds are `code`, `table` and `prose`."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
            yield number, "fence", line
        else:
            yield number, "code" if inside else "table" if line.lstrip().startswith("|") else "prose", line


def bullets(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and whole text of each bullet, its continuation lines included."""
    start, text = 0, ""
    for number, kind, line in lines(page):
        item = kind == "prose" and re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        if start and (item or kind != "prose" or not line.startswith(" ")):
            yield start, text
            start, text = 0, ""
        if item:
            start, text = number, line
        elif start:
            text += " " + line.strip()
    if start:
        yield start, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_can_be_typed_as_it_stands(page: Path) -> None:
    """`…` in a command is no argument; behind its comment it is one of words."""
    commands = [(n, line) for n, kind, line in lines(page) if kind == "code" and COMMAND.match(line)]
    assert [f"{n}: {line}" for n, line in commands if "…" in line.partition(" # ")[0]] == []


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "docs" / name for name in sorted(GENERATED))], ids=str)
def test_lines_and_bullets_are_short(page: Path) -> None:
    long = [f"{n}: {len(line)} characters" for n, kind, line in lines(page) if kind == "prose" and len(line) > MAX_LINE]
    wordy = [f"{n}: {len(text.split())} words" for n, text in bullets(page) if len(text.split()) > MAX_BULLET_WORDS]
    assert (long, wordy) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_a_command(page: Path) -> None:
    if page.name in ("architecture.md", "glossary.md") or page.parent.name == "decisions":
        pytest.skip("explains, and has nothing to type first")
    assert any(kind == "fence" for n, kind, _ in lines(page) if n <= EARLY)


def code(page: Path) -> list[str]:
    """The lines of the code of a page without their comments."""
    found = (re.sub(r"\s+#.*", "", line).strip() for _, kind, line in lines(page) if kind == "code")
    return [line for line in found if not line.startswith("#")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.endswith(".zh.md")], ids=lambda page: page.name)
def test_both_languages_have_the_same_code_and_names(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    assert code(page) == code(english)
    named = [set(re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))) for path in (page, english)]
    assert named[0] == named[1]


def typed_jobs(page: Path) -> Iterator[str]:
    """The words of each command that starts or plans a job, but for one whose error the page shows."""
    code = "\n".join(line for _, kind, line in lines(page) if kind != "prose").replace("\\\n", "")
    for command, after in pairwise([*code.splitlines(), ""]):
        if (job := JOB.match(command)) and not after.startswith("error: "):
            yield job[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_jobs_that_a_page_types_are_valid(
    page: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.name == "extend.md":
        pytest.skip("its jobs need the package that it writes")
    for name in WRITTEN:
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text("defaults: [sft_demo]\n" + "sweep: {over: {seed: [1, 2]}}\n" * ("exp" not in name))
    monkeypatch.chdir(workdir / "here")
    wrong = {}
    for job in typed_jobs(page):
        words = takewhile(lambda word: not word.startswith("--"), shlex.split(job, comments=True))
        if main([*words, "--cfg", "job"]) != 0:
            wrong[job] = capsys.readouterr().err
    assert wrong == {}


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    titles = [line.lstrip("#").strip() for _, kind, line in lines(page) if kind == "prose" and line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / name).resolve() if name else page, anchor) for name, anchor in found]
    assert [f"{path.name}#{anchor}" for path, anchor in targets if anchor not in anchors(path)] == []


PATH = re.compile(r"`(\w+/[\w/]*(?:\.py|\.yaml|/))`")


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "decisions" or p.stem in CODE_PAGES])
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "runner" / name).exists()] == []


def test_the_architecture_page_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each group and section, from the files that list them all."""
    job = yaml.safe_load((ROOT / "conf" / "job.yaml").read_text(encoding="utf-8"))
    known = {name: set(section) for name, section in job.items() if isinstance(section, dict)}
    for path in [*(ROOT / "conf").glob("*/*.yaml"), *(ROOT / "simulators").glob("**/conf/*/*.yaml")]:
        known.setdefault(path.parent.name, set()).update(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_options_that_a_page_sets_exist(page: Path, options: dict[str, set[str]]) -> None:
    if page.name == "extend.md":
        pytest.skip("its options are those of the package that it writes")
    found = {
        f"{n}: {group}.{name}"
        for n, _, line in lines(page)
        for group, name in OPTION.findall(line)
        if group in options and name not in options[group] and f"{group}.{name}" not in WRONG_ON_PURPOSE
    }
    assert sorted(found) == []


def test_the_support_table_has_one_state_a_cell() -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    [part] = [part for part in text.split("\n## ") if part.startswith("Feature matrix")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert {cell for row in rows for cell in row[1:4]} <= STATES
    assert [row[0] for row in rows if "●" in row[1:4] and not re.search(r"\d{4}-\d\d-\d\d", row[4])] == []
