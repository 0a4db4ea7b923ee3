"""Optuna's samplers: what each of them needs and cannot do, so that it is refused before a search begins."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from runner.errors import EnvironmentProblem, Problem
from runner.sweep.config import SweepConfig
from runner.sweep.space import Search

CLASSES = {"tpe": "TPESampler", "random": "RandomSampler", "nsgaii": "NSGAIISampler", "gp": "GPSampler",
           "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}  # fmt: skip
PACKAGES = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",), "qmc": ("scipy",)}
NUMBERS_ONLY = ("cmaes", "qmc")  # choices would be drawn at random
FIXED_SPACE = ("gp", "cmaes", "qmc")  # what only some jobs have would be drawn at random
DEFAULT = "tpe"


def load(name: str | None) -> Any:
    """Optuna. Raises EnvironmentProblem where it, or what the sampler needs, is not installed."""
    wanted = ("optuna", *PACKAGES.get(name or DEFAULT, ()))
    if missing := [package for package in wanted if find_spec(package) is None]:
        what = "sweep.search=optuna" if "optuna" in missing else f"sweep.sampler={name}"
        text = f"{what} needs the package {' and '.join(missing)}: pip install 'posttrain-run[optuna]'"
        raise EnvironmentProblem(text)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def sampler(optuna: Any, name: str | None, seed: int, jobs: int) -> Any:
    """A sampler for a study that has `jobs` jobs already: one that keeps no state of its own in the study draws anew,
    and not what it drew when the search began."""
    kind = name or DEFAULT
    return getattr(optuna.samplers, CLASSES[kind])(seed=seed if kind == "qmc" else seed + jobs)


def unfit(options: SweepConfig, search: Search, objectives: int) -> list[Problem]:
    """What the sampler, or Optuna, cannot do of what is asked for."""
    name = options.sampler or DEFAULT
    choices = [d.key for d in search.space if d.kind == "choice"]
    sometimes = [d.name for d in search.space if d.given]
    found = []
    if name in NUMBERS_ONLY and choices:
        text = f"{name} varies numbers only, and {', '.join(choices)} is a choice; tpe, nsgaii, gp and random take it"
        found.append(Problem("sweep.sampler", text))
    if name in FIXED_SPACE and sometimes:
        text = f"{name} needs jobs that all vary the same, unlike {', '.join(sometimes)}; tpe, nsgaii and random do not"
        found.append(Problem("sweep.sampler", text))
    if name == "cmaes" and not choices and len(search.space) < 2:
        found.append(Problem("sweep.sampler", "cmaes varies two or more numbers together; take tpe or gp for one"))
    if name == "cmaes" and objectives > 1:
        found.append(Problem("sweep.sampler", "cmaes takes one metric; tpe, nsgaii, gp, qmc and random take several"))
    size = search.size()
    if size is not None and options.trials is not None and size < options.trials:
        text = f"there are {size} different jobs only; give sweep.trials={size} at most, or leave sweep.search out"
        found.append(Problem("sweep.trials", text))
    return found
