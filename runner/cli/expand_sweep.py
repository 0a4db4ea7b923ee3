"""From a command line with several values to the jobs of a sweep, all decoded before one starts.

words ─▶ axes (Hydra's grammar; a recipe's sweep.over) ─▶ product ─▶ draft, decode each ─▶ Expansion
                          └──────── everything wrong with any job is reported at once ────────┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader

from runner.cli.config_sources import GROUP, hydra_session
from runner.cli.hydra_compose import SWEEP
from runner.cli.job_builder import ComposedJob, JobDraft, SpecComposer, decode_draft, make_composer
from runner.cli.overrides import read_overrides
from runner.cli.sweep_axes import axes_in, decode_sweep_options, recipe_axes, recipe_space, space_in
from runner.core.errors import Problem, SpecError
from runner.run_dir.manifest import fingerprint
from runner.spec.registry import default_registry
from runner.sweep.config import SweepConfig
from runner.sweep.space import Dimension, SearchSpace

# what users of Hydra's plug-in type
HYDRAS_SWEEPERS = {"hydra/sweeper=optuna": "sweep.search=optuna", "hydra/sweeper=basic": "sweep.search=null"}
LISTS = (f"{SWEEP}.metric", f"{SWEEP}.metric_mode")
MOST_JOBS = 10_000
MOST_NAMED = 3  # jobs that a problem names, of those that have it
NOTHING_VARIES = (
    "the sweep varies no option; set several values (optimizer.lr=1e-4,3e-4), or use a recipe with a section "
    "sweep.over; for one run leave -m out"
)


@dataclass(frozen=True, slots=True)
class SweepMember:
    """A job of a sweep: what was typed for it, and what of that no other job shares."""

    composed: ComposedJob
    varied: dict[str, str]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The jobs of a sweep, in the order in which they start, and how they are run.

    Of a search, `members` are jobs at the corners of its `space`, which show that it can be run; `fixed` are the words
    that all its jobs share. draft: drafts further jobs of the files as they were read
    """

    members: tuple[SweepMember, ...]
    options: SweepConfig
    notes: tuple[str, ...]
    draft: MakeDraft
    space: tuple[Dimension, ...] = ()
    fixed: tuple[str, ...] = ()


MakeDraft = Callable[[Sequence[str]], JobDraft]
Case = tuple[tuple[str, ...], dict[str, str]]  # the words of a job, and what it varies


def expand(words: Sequence[str], config_dir: Path | None = None, spec: Path | None = None) -> Expansion:
    """The jobs that a command line with -m describes; with `spec`, those words over that spec.yaml.

    Raises SpecError with every problem of every job, each with the jobs that have it.
    """
    own, rest = _partition(words)
    draft = make_draft(config_dir, spec)
    with hydra_session(default_registry(), config_dir) as loader:
        if _is_search(own, rest, draft, loader):
            return _expand_search(own, rest, draft, loader)
        axes, fixed, problems = axes_in(rest, loader)
        judged = _ProblemCollector(problems)
        cases = list(_cases(axes, fixed, draft, loader, judged)) if not problems else []
        members = [m for words, varied in cases if (m := judged.member(words, varied, draft))]
    options, problems = judged.options(own, varies=any(m.varied for m in members))
    if problems := [*problems, *_duplicate_jobs(members)]:
        raise SpecError(problems)
    return Expansion(tuple(members), options, judged.notes(), draft)


def make_draft(config_dir: Path | None, spec: Path | None) -> MakeDraft:
    """Return a function that drafts the jobs of a sweep, and reads each file once, also for a search."""
    composer = make_composer(config_dir)
    return composer.draft if spec is None else SpecComposer(spec, config_dir, composer).draft


def _partition(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words about the sweep itself, and those about its jobs."""
    words = [_as_list_option(HYDRAS_SWEEPERS.get(word, word)) for word in words]
    own = [w for w in words if w.lstrip("+").partition("=")[0].partition(".")[0] == SWEEP]
    return own, [w for w in words if w not in own]


def _as_list_option(word: str) -> str:
    """sweep.metric=a,b is a list: a sweep has one set of options, so that nothing of it varies."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key.lstrip("+") in LISTS and "," in value and value[0] not in "['\"" else word


def _is_search(own: Sequence[str], rest: Sequence[str], draft: MakeDraft, loader: ConfigLoader) -> bool:
    """Whether the command line or the recipe requests a search."""
    drafts = []
    space, fixed, _ = space_in(rest, loader)
    with suppress(SpecError):  # said in full, whichever way the jobs are made
        drafts = [draft([*fixed, *(dimension.corners()[0][0] for dimension in space)])]
    return decode_sweep_options(drafts, read_overrides(own, ())[0])[0].search is not None


def _expand_search(own: Sequence[str], rest: Sequence[str], draft: MakeDraft, loader: ConfigLoader) -> Expansion:
    """The space of a search. Raises SpecError with every problem of every job at one of its corners."""
    space, fixed, problems = space_in(rest, loader)
    judged = _ProblemCollector(problems)
    first = [*fixed, *(d.corners()[0][0] for d in space if d.key != GROUP)]
    for given, _ in next((d.corners() for d in space if d.key == GROUP), [("", "")]):
        with suppress(SpecError):  # said again, in full, when the corners are judged
            drafted = draft([*first, given] if given else first)
            more, wrong = recipe_space(drafted, rest, loader, given)
            space += more
            judged.add({}, wrong)
    search = SearchSpace(tuple(space), tuple(fixed))
    members = [m for words, varied in search.corners() if (m := judged.member(words, varied, draft))]
    options, problems = judged.options(own, varies=bool(space))
    if problems:
        raise SpecError(problems)
    return Expansion(tuple(members), options, judged.notes(), draft, search.space, search.fixed)


def _cases(
    axes: Sequence[Dimension], fixed: Sequence[str], draft: MakeDraft, loader: ConfigLoader, judged: _ProblemCollector
) -> Iterator[Case]:
    """The words of each job: the product of the command line's axes, times those of the recipe it chose."""
    of_recipes: dict[str, list[Dimension]] = {}
    for words, varied in _product(axes, fixed):
        chosen = " ".join(w for w in words if w.lstrip("+").startswith(f"{GROUP}="))
        if chosen not in of_recipes:
            try:
                of_recipes[chosen], wrong = recipe_axes(draft(words), words, loader)
                judged.add(varied, wrong)
            except SpecError:
                of_recipes[chosen] = []  # said again, in full, when the job itself is drafted
        for more, inner in _product(of_recipes[chosen], ()):
            yield (*words, *more), varied | inner


def _product(axes: Sequence[Dimension], fixed: Sequence[str]) -> Iterator[Case]:
    """All combinations, the last axis varying fastest. Raises SpecError where they are too many."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_JOBS:
        raise SpecError([Problem("", f"{count} jobs are more than the limit of {MOST_JOBS}; vary fewer values")])
    for combination in itertools.product(*(axis.values for axis in axes)):
        varied = {axis.key: shown for axis, (_, shown) in zip(axes, combination, strict=True)}
        yield (*fixed, *(word for word, _ in combination)), varied


class _ProblemCollector:
    """What is wrong with the jobs of a sweep: each problem once, with the jobs that have it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._jobs: list[Mapping[str, str]] = []
        self._found: dict[Problem, list[Mapping[str, str]]] = {p: [] for p in problems}
        self._drafts: dict[str, JobDraft] = {}  # one for each section `sweep` that the recipes have
        self._notes: dict[str, None] = {}

    def add(self, varied: Mapping[str, str], problems: Sequence[Problem]) -> None:
        """Take in what is wrong with one job."""
        for found in problems:
            self._found.setdefault(found, []).append(varied)

    def member(self, words: Sequence[str], varied: dict[str, str], draft: MakeDraft) -> SweepMember | None:
        """The job of these words; None, and its problems kept, where it is none."""
        self._jobs.append(varied)
        try:
            drafted = draft(words)
            self._drafts.setdefault(str(drafted.sweep), drafted)
            composed = decode_draft(drafted, default_registry())
        except SpecError as error:
            self.add(varied, error.problems)
            return None
        self._notes |= dict.fromkeys(composed.notes)
        return SweepMember(composed, varied)

    def options(self, own: Sequence[str], *, varies: bool) -> tuple[SweepConfig, list[Problem]]:
        """The options by the recipes and the sweep's `own` words, and every problem of jobs and options."""
        typed, wrong = read_overrides(own, ())
        options, mistakes = decode_sweep_options(self._drafts.values(), typed)
        problems = [*self._problems(), *wrong, *mistakes]
        return options, problems if problems or varies else [Problem("", NOTHING_VARIES)]

    def notes(self) -> tuple[str, ...]:
        """The lines that the jobs have for the user, each once."""
        return tuple(self._notes)

    def _problems(self) -> list[Problem]:
        """Every problem, with its jobs where not all of them have it."""
        return [Problem(p.key, p.message + self._whose(jobs), p.origin) for p, jobs in self._found.items()]

    def _whose(self, jobs: Sequence[Mapping[str, str]]) -> str:
        """What only the jobs with a problem have in common; the first few of them where that is nothing."""
        if not jobs or len(jobs) == len(self._jobs):
            return ""
        common = dict(set.intersection(*(set(job.items()) for job in jobs)))
        if common and sum(common.items() <= job.items() for job in self._jobs) == len(jobs):
            return f" (with {_varied_text({key: jobs[0][key] for key in jobs[0] if key in common})})"
        named = "; ".join(map(_varied_text, jobs[:MOST_NAMED]))
        return f" (with {named}{f' and {len(jobs) - MOST_NAMED} more' if len(jobs) > MOST_NAMED else ''})"


def _duplicate_jobs(members: Sequence[SweepMember]) -> list[Problem]:
    """A problem for each job that is an earlier one again."""
    first: dict[str, int] = {}
    problems = []
    for number, member in enumerate(members):
        twin = first.setdefault(fingerprint(member.composed.data), number)
        if twin != number:
            text = f"jobs {twin} and {number} are the same job ({_varied_text(member.varied)}); leave one out"
            problems.append(Problem("", text))
    return problems


def _varied_text(varied: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in varied.items())
