"""The recipes that a job has run first (`recipe:NAME`), looked for before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from runner.cli.sources import GROUP, recipes
from runner.errors import Problem
from runner.spec.decode import unknown_name
from runner.spec.job import RECIPE, JobSpec
from runner.spec.origin import origin_of


def unknown_stages(spec: JobSpec, origins: Mapping[str, str]) -> list[Problem]:
    """A problem for each option that names a recipe which is nowhere; --config-dir is not looked in, as it is not
    handed on to a recipe that is run first."""
    models = {f"algorithm.{option}": path for option, path in spec.algorithm.first_models().items()}
    paths = {"init_from": spec.init_from or "", **models}
    named = {key: path.removeprefix(RECIPE) for key, path in paths.items() if path.startswith(RECIPE)}
    if not named:
        return []
    known = recipes()
    wrong = {key: unknown_name(GROUP, name, known) for key, name in named.items() if name not in known}
    return [Problem(key, message, origin_of(key, origins)) for key, message in wrong.items()]
