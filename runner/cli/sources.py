"""Where Hydra finds config groups and recipes, and a Hydra that looks there.

    shipped conf ▶ ./recipes ▶ ./conf ▶ shipped recipes ▶ plug-ins ▶ --config-dir ▶ components without a file

The first that has a file of a name wins. A folder of recipes is shown as the config group `recipe`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import hydra
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from runner.core.errors import EnvironmentProblem
from runner.core.paths import conf_dir, recipes_dir
from runner.spec.registry import Registry
from runner.spec.schema import groups_of

GROUP = "recipe"
ENTRY_POINT_GROUP = "runner.conf"


class RecipesSource(ConfigSource):
    """Shows the YAML files of a folder, and of the folders in it, as the config group `recipe`."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        place = self._place(config_path)
        return self.available() if config_path == "" else place is not None and place.is_dir()

    def is_config(self, config_path: str) -> bool:
        place = self._place(self._normalize_file_name(config_path))
        return place is not None and place.is_file()

    def load_config(self, config_path: str) -> ConfigResult:
        place = self._place(self._normalize_file_name(config_path))
        if place is None or not place.is_file():
            raise ConfigLoadError(f"no recipe at {self.full_path()}: {config_path}")
        try:
            with place.open(encoding="utf-8") as file:
                header = self._get_header_dict(file.read())
                file.seek(0)
                config = OmegaConf.load(file)
        except UnicodeDecodeError as error:
            raise ConfigLoadError(f"{place}: not UTF-8 (byte {error.start})") from error
        # A recipe is about the whole job, also when its author forgot to say so.
        header["package"] = header["package"] or "_global_"
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        place = self._place(config_path)
        if place is None:
            return [GROUP] if config_path == "" and results_filter != ObjectType.CONFIG else []
        found: list[str] = []
        for name in sorted(os.listdir(place)):
            if name.endswith(".yaml") or (place / name).is_dir():
                self._list_add_result(found, f"{config_path}/{name}", name, results_filter)
        return sorted(set(found))

    def _place(self, config_path: str) -> Path | None:
        parts = PurePosixPath(config_path).parts
        if not parts or parts[0] != GROUP or ".." in parts:
            return None
        return Path(self.path, *parts[1:])


class RunnerSearchPath(SearchPathPlugin):
    """Adds the user's folders, the shipped recipes and the plug-ins' to Hydra's search path."""

    extra: ClassVar[Path | None] = None  # --config-dir; Hydra makes the instance, so it has nowhere else to stand

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, path in search_order(self.extra):
            search_path.append(provider, path)


def search_order(extra: Path | None) -> Iterator[tuple[str, str]]:
    """(who, URL) of everything after the shipped conf/ that exists, in search order."""
    here = Path.cwd()
    places = [("you", "recipes", here / "recipes"), ("you", "file", here / "conf")]
    places.append(("runner", "recipes", recipes_dir()))
    for owner, folder in plugin_folders():
        places += [(owner, "file", folder / "conf"), (owner, "recipes", folder / "recipes")]
    if extra is not None:
        places += [("--config-dir", "file", extra), ("--config-dir", "recipes", extra / "recipes")]
    seen = {conf_dir()}
    for owner, scheme, place in places:
        if place.resolve() not in seen and place.is_dir():
            seen.add(place.resolve())
            yield owner, f"{scheme}://{place}"


@cache
def plugin_folders() -> tuple[tuple[str, Path], ...]:
    """(plug-in, folder of its package) for each installed package that offers conf/ or recipes/; none is imported."""
    found = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        spec = importlib.util.find_spec(point.value)
        if spec is None or not spec.submodule_search_locations:
            raise EnvironmentProblem(f"the plug-in {point.name}: no package {point.value!r} to take conf/ from")
        found += [(point.name, Path(place)) for place in spec.submodule_search_locations]
    return tuple(found)


@contextmanager
def session(registry: Registry, config_dir: Path | None = None) -> Iterator[ConfigLoader]:
    """Hydra, looking in all the right places. Raises EnvironmentProblem if --config-dir is no folder."""
    if config_dir is not None and not config_dir.is_dir():
        raise EnvironmentProblem(f"--config-dir {config_dir}: no such folder")
    plugins = Plugins.instance()
    for plugin in (RecipesSource, RunnerSearchPath):
        plugins.register(plugin)
    RunnerSearchPath.extra = config_dir and config_dir.resolve()
    with initialize_config_dir(config_dir=str(conf_dir()), job_name="run", **_version_base()):
        loader = GlobalHydra.instance().config_loader()
        _store_components_without_file(registry, loader.get_sources())
        yield loader


def options(sources: Sequence[ConfigSource], group: str) -> list[str]:
    """What can be chosen for `group`, folders within it included, in alphabetical order."""
    found: set[str] = set()
    for source in sources:
        if source.is_group(group):
            found.update(source.list(group, ObjectType.CONFIG))
            for folder in source.list(group, ObjectType.GROUP):
                found.update(f"{folder}/{name}" for name in options([source], f"{group}/{folder}"))
    return sorted(found)


def recipes() -> list[str]:
    """The recipes that are found without --config-dir; no session is needed, and one may be open."""
    found = [tuple(url.split("://", 1)) for _, url in search_order(None)]
    folders = [place if scheme == RecipesSource.scheme() else f"{place}/{GROUP}" for scheme, place in found]
    return options([RecipesSource("", f"{RecipesSource.scheme()}://{folder}") for folder in folders], GROUP)


def holders(sources: Iterable[ConfigSource], config_path: str) -> list[ConfigSource]:
    """The sources that have a config of this path; the first is the one used."""
    return [source for source in sources if source.is_config(config_path)]


def _store_components_without_file(registry: Registry, sources: Sequence[ConfigSource]) -> None:
    """Let `group=name` work for a plug-in's component that has no YAML file: its schema's defaults are its config."""
    for group in groups_of(registry):
        for name, cls in registry.classes(group).items():
            if not holders(sources, f"{group}/{name}"):
                fields = cls.model_fields.items()
                node = {
                    key: "???" if info.is_required() else plain(info.get_default(call_default_factory=True))
                    for key, info in fields
                }
                ConfigStore.instance().store(group=group, name=name, node=node)


def plain(value: Any) -> Any:
    """A default as YAML has it: tuples become lists."""
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _version_base() -> dict[str, str]:
    # Hydra 1.3 warns without it, 1.4 warns with it.
    major, minor = (int(part) for part in hydra.__version__.split(".")[:2])
    return {"version_base": "1.3"} if (major, minor) < (1, 4) else {}
