"""Where Hydra finds config groups and recipes, and a Hydra that looks there.

    --config-dir ▶ ./recipes ▶ ./conf ▶ shipped conf ▶ shipped recipes ▶ plug-ins ▶ components without a file

The first that has a file of a name wins. A folder of recipes is shown as the config group `recipe`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from runner.cli.config_sources import GROUP, FolderSource, RecipeFileSource, RecipesSource, sources_with
from runner.core.errors import EnvironmentProblem
from runner.core.imports import load_plugins
from runner.core.paths import conf_dir, recipes_dir
from runner.spec.registry import Registry
from runner.spec.schema import CALLBACKS, groups_of

ENTRY_POINT_GROUP = "runner.conf"


class RunnerSearchPath(SearchPathPlugin):
    """Adds the user's folders, the shipped recipes and the plug-ins' to Hydra's search path."""

    extra: ClassVar[Path | None] = None  # --config-dir; Hydra makes the instance, so it has nowhere else to stand

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        before, after = search_order(self.extra)
        for provider, path in before:
            search_path.prepend(provider, path, anchor="main")
        for provider, path in after:
            search_path.append(provider, path)
        search_path.append("files", f"{RecipeFileSource.scheme()}:///")


def search_order(extra: Path | None) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(owner, URL) of every existing folder in search order: before the shipped conf/, and after it."""
    here = Path.cwd()
    own = [("--config-dir", "recipes", extra / "recipes"), ("--config-dir", "conf", extra)] if extra else []
    own += [("you", "recipes", here / "recipes"), ("you", "conf", here / "conf")]
    others = [("runner", "recipes", recipes_dir())]
    for owner, folder in plugin_folders():
        others += [(owner, "conf", folder / "conf"), (owner, "recipes", folder / "recipes")]
    seen = {conf_dir(), recipes_dir()}
    before = list(_new(own, seen))
    return before, list(_new(others, seen - {recipes_dir()}))


def _new(places: Iterable[tuple[str, str, Path]], seen: set[Path]) -> Iterator[tuple[str, str]]:
    """The folders that exist and were not `seen`, to which they are added."""
    for owner, scheme, place in places:
        if place.resolve() not in seen and place.is_dir():
            seen.add(place.resolve())
            yield owner, f"{scheme}://{place}"


@cache
def plugin_folders() -> tuple[tuple[str, Path], ...]:
    """(plug-in, folder) for each installed package that has conf/ or recipes/; none is imported."""
    return tuple(place for places in load_plugins(ENTRY_POINT_GROUP, _folders) for place in places)


def _folders(point: EntryPoint) -> list[tuple[str, Path]]:
    spec = importlib.util.find_spec(point.value)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentProblem(f"there is no package {point.value!r} to take conf/ from")
    return [(point.name, Path(place)) for place in spec.submodule_search_locations]


@contextmanager
def hydra_session(registry: Registry, config_dir: Path | None = None) -> Iterator[ConfigLoader]:
    """Hydra, looking in all the right places. Raises EnvironmentProblem if --config-dir is no folder."""
    if config_dir is not None and not config_dir.is_dir():
        raise EnvironmentProblem(f"--config-dir {config_dir}: no such folder")
    plugins = Plugins.instance()
    for plugin in (FolderSource, RecipesSource, RecipeFileSource, RunnerSearchPath):
        plugins.register(plugin)
    RunnerSearchPath.extra = config_dir and config_dir.resolve()
    with initialize_config_dir(config_dir=str(conf_dir()), job_name="run", **_version_base()):
        loader = GlobalHydra.instance().config_loader()
        sources = loader.get_sources()
        for place, source in enumerate(sources, 1):
            if isinstance(source, FolderSource):
                source.after = sources[place:]
        _store_components_without_file(registry, sources)
        yield loader


def group_options(sources: Sequence[ConfigSource], group: str) -> list[str]:
    """What can be chosen for `group`, folders within it included, in alphabetical order."""
    found: set[str] = set()
    for source in sources:
        if source.is_group(group):
            found.update(source.list(group, ObjectType.CONFIG))
            for folder in source.list(group, ObjectType.GROUP):
                found.update(f"{folder}/{name}" for name in group_options([source], f"{group}/{folder}"))
    return sorted(found)


def known_recipes() -> list[str]:
    """The recipes that are found without --config-dir; no session is needed, and one may be open."""
    found = [tuple(url.split("://", 1)) for found in search_order(None) for _, url in found]
    folders = [place if scheme == RecipesSource.scheme() else f"{place}/{GROUP}" for scheme, place in found]
    return group_options([RecipesSource("", f"{RecipesSource.scheme()}://{folder}") for folder in folders], GROUP)


def _store_components_without_file(registry: Registry, sources: Sequence[ConfigSource]) -> None:
    """Let `group=name` work for a plug-in's component without a YAML file, with its schema's defaults."""
    for group in (*groups_of(registry), CALLBACKS):
        for name, cls in registry.classes(group).items():
            if not sources_with(sources, f"{group}/{name}"):
                fields = cls.model_fields.items()
                node = {
                    key: "???" if info.is_required() else plain_default(info.get_default(call_default_factory=True))
                    for key, info in fields
                }
                ConfigStore.instance().store(group=group, name=name, node={name: node} if group == CALLBACKS else node)


def plain_default(value: Any) -> Any:
    """A default as YAML has it: tuples become lists."""
    return [plain_default(item) for item in value] if isinstance(value, tuple) else value


def _version_base() -> dict[str, str]:
    # Hydra 1.3 warns without it, 1.4 warns with it.
    major, minor = (int(part) for part in hydra.__version__.split(".")[:2])
    return {"version_base": "1.3"} if (major, minor) < (1, 4) else {}
