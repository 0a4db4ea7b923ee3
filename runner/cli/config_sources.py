"""Folders and single files as Hydra's sources of config files, in the order of the search path:

--config-dir ▶ ./recipes ▶ ./conf ▶ shipped conf ▶ shipped recipes ▶ plug-ins ▶ components without a file

The first that has a file of a name wins. A folder of recipes is shown as the config group `recipe`.

A file may extend the one of the same name that it overrides, which Hydra knows no name for:

    conf/optimizer/adamw.yaml, `defaults: [adamw, _self_]`  ──▶  optimizer/adamw~  ──▶  the next one in the search path
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import hydra
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig

from runner.cli.user_yaml import load_yaml
from runner.core.errors import DataError, EnvironmentProblem
from runner.core.package import conf_dir, load_plugins, recipes_dir
from runner.data.readers import read_whole_text
from runner.run_dir.folder import display_path
from runner.spec import suggest
from runner.spec.registry import Registry
from runner.spec.schema import CALLBACKS, groups_of

ENTRY_POINT_GROUP = "runner.conf"
JOB = "job"
GROUP = "recipe"
SWEEPER = "hydra/sweeper"
SHIPPED = "shipped"
NEXT = "~"  # optimizer/adamw~ is the second optimizer/adamw of the search path, optimizer/adamw~~ the third
FILE = ":"  # recipe/:/FOLDER/exp.yaml is a file, wherever it is
SUFFIXES = (".yaml", ".yml")
MOST_NAMED = 12  # files of a folder that a message names


class FolderSource(ConfigSource):
    """The YAML files of a folder: conf/<group>/<name>.yaml."""

    after: Sequence[ConfigSource] = ()  # the sources after this one in the search path

    @staticmethod
    def scheme() -> str:
        return "conf"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        place = self.path_of(config_path)
        return place is not None and place.is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.source_of(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.rstrip(NEXT)
        holder = self.source_of(config_path)
        if holder is None:
            raise ConfigLoadError(f"no file in {self.path}: {config_path}")
        result = holder.read(name) if isinstance(holder, FolderSource) else holder.load_config(name)
        following = config_path + NEXT
        if self.source_of(following) is not None:  # else a file that extends itself is a circle
            _replace(result.config, name, following)
        return result

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        place = self.path_of(config_path)
        found: list[str] = []
        if place is None:
            return found
        for name in sorted(os.listdir(place)):
            if name.endswith(".yaml") or (place / name).is_dir():
                self._list_add_result(found, f"{config_path}/{name}", name, results_filter)
        return sorted(set(found))

    def source_of(self, config_path: str) -> ConfigSource | None:
        """The source whose file a config path names: this one, or, for `name~`, one after it."""
        name = config_path.rstrip(NEXT)
        place = self.path_of(self._normalize_file_name(name))
        if place is None or not place.is_file():
            return None
        held = [self, *(source for source in self.after if source.is_config(name))]
        depth = len(config_path) - len(name)
        return held[depth] if depth < len(held) else None

    def read(self, name: str) -> ConfigResult:
        """The content of a file of this folder. Raises ConfigLoadError, which names it."""
        place = self.path_of(self._normalize_file_name(name))
        assert place is not None  # is_config was asked
        try:
            text = read_whole_text(place, "file")
            header, config = self._get_header_dict(text), load_yaml(text, str(place))
        except DataError as error:
            raise ConfigLoadError(str(error)) from error
        except (OSError, ValueError) as error:
            raise ConfigLoadError(f"{place}: {error}") from error
        if PurePosixPath(name).parts[0] == GROUP:
            if not config:
                raise ConfigLoadError(f"{display_path(place)}: the recipe is empty; add options, e.g. steps: 100")
            # A recipe is about the whole job, also when its author forgot to say so.
            header["package"] = header["package"] or "_global_"
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def path_of(self, config_path: str) -> Path | None:
        """The file or folder of a config path, whether it exists or not; None outside of this source."""
        return None if ".." in PurePosixPath(config_path).parts else Path(self.path, config_path)


class RecipesSource(FolderSource):
    """The YAML files of a folder, and of the folders in it, as the config group `recipe`."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def is_group(self, config_path: str) -> bool:
        return self.available() if config_path == "" else super().is_group(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [GROUP] if results_filter != ObjectType.CONFIG else []
        return super().list(config_path, results_filter)

    def path_of(self, config_path: str) -> Path | None:
        parts = PurePosixPath(config_path).parts
        return None if parts[:1] != (GROUP,) or ".." in parts else Path(self.path, *parts[1:])


class RecipeFileSource(FolderSource):
    """Any YAML file as a recipe, by its absolute path; it extends files beside it, else recipes by name."""

    @staticmethod
    def scheme() -> str:
        return "recipe-file"

    def is_group(self, config_path: str) -> bool:
        return False

    def read(self, name: str) -> ConfigResult:
        result = super().read(name)
        file = self.path_of(self._normalize_file_name(name))
        defaults = defaults_of(result.config)
        for index, entry in enumerate(defaults):
            if file is not None and isinstance(entry, str) and not entry.startswith(("/", "_self_")):
                beside = file.parent / self._normalize_file_name(entry)
                if beside == file or not beside.is_file():
                    defaults[index] = f"/{GROUP}/{entry}"
        return result

    def path_of(self, config_path: str) -> Path | None:
        start = f"{GROUP}/{FILE}"
        return Path(config_path.removeprefix(start)) if config_path.startswith(start) else None

    @staticmethod
    def _normalize_file_name(filename: str) -> str:
        return filename if filename.endswith(SUFFIXES) else f"{filename}.yaml"


class ShippedSource(FileConfigSource):
    """The shipped conf/, each file of which a process parses once: a sweep composes many jobs."""

    @staticmethod
    def scheme() -> str:
        return "shipped"

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        return deepcopy(_parse_file(self.provider, self.path, config_path, file.stat().st_mtime_ns))


@cache
def _parse_file(provider: str, folder: str, config_path: str, mtime_ns: int) -> ConfigResult:
    return FileConfigSource(provider, folder).load_config(config_path)


def is_file_name(recipe: str) -> bool:
    """Whether a recipe is named by its file's path."""
    return recipe.endswith(SUFFIXES)


def recipe_member_name(recipe: str) -> str:
    """The name of the recipe in a file, as a member of the group."""
    return f"{FILE}{os.path.abspath(os.path.expanduser(recipe))}"


def recipe_file_problem(recipe: str) -> str:
    """Why there is no recipe at this path, and what there is; empty if there is one."""
    path = Path(os.path.abspath(os.path.expanduser(recipe)))
    if "${" in str(path):
        text = f"{recipe}: ${{…}} is not resolved in the path of a recipe"
        return f"{text}; type the path itself" if "${" in recipe else f"{text} ({path.parent}); rename that folder"
    if os.path.isfile(path):
        return ""
    if os.path.isdir(path):
        return f"{recipe} is a folder, not a file" + _folder_contents(path, "")
    folder = next(place for place in path.parents if os.path.isdir(place))
    own = Path("recipes", f"{path.stem}.yaml")
    by_name = f"; the one in ./recipes is +{GROUP}={path.stem}" if own.is_file() and own.absolute() != path else ""
    if folder != path.parent:
        text = f"no file {recipe}: there is no folder {display_path(path.parent)}"
        return text + by_name + _folder_contents(folder, "")
    return f"no file {recipe}{by_name}" + _folder_contents(folder, path.name)


def _folder_contents(folder: Path, name: str) -> str:
    """The recipes and folders of a folder, and the one that was probably meant."""
    try:
        entries = sorted(e.name + ("/" if e.is_dir() else "") for e in os.scandir(folder) if e.name[0] != ".")
    except OSError as error:
        return f"; {display_path(folder)} cannot be read: {error.strerror}"
    found = [entry for entry in entries if entry.endswith(("/", *SUFFIXES))]
    hint = suggest.did_you_mean(name, [entry for entry in found if entry[-1] != "/"])
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{hint} (in {display_path(folder)}: {', '.join(found[:MOST_NAMED]) or 'neither recipes nor folders'}{more})"


def sources_with(sources: Iterable[ConfigSource], config_path: str) -> list[ConfigSource]:
    """The sources that have a config of this path; the first is the one used."""
    return [source for source in sources if source.is_config(config_path)]


def folders_named(config_path: str, sources: Iterable[ConfigSource]) -> list[str]:
    """Folders that stand where the file of a config would be."""
    places = (s.path_of(f"{config_path}.yaml") for s in sources if isinstance(s, FolderSource))
    return [display_path(place) for place in places if place is not None and place.is_dir()]


def file_of(source: ConfigSource, config_path: str) -> str:
    """The file of a config in a source, as a user would type it; the source's URL where it is no file."""
    if isinstance(source, FolderSource):
        holder = source.source_of(config_path)
        if holder is not None and holder is not source:
            return file_of(holder, config_path.rstrip(NEXT))
        place = source.path_of(source._normalize_file_name(config_path))
        return display_path(place.absolute()) if place is not None else source.full_path()
    if isinstance(source, FileConfigSource):
        return display_path(Path(source.path, f"{config_path}.yaml"))
    return source.full_path()


def owner_of(source: ConfigSource, config_path: str) -> str:
    """Whose a config is: `shipped`, or its file."""
    if isinstance(source, FolderSource) and (holder := source.source_of(config_path)) not in (None, source):
        return owner_of(holder, config_path.rstrip(NEXT)) if holder else ""
    shipped = source.path in (str(conf_dir()), str(recipes_dir()))
    return SHIPPED if shipped else file_of(source, config_path)


def label(config_path: str, sources: Iterable[ConfigSource]) -> str:
    """A config path as the user knows it."""
    start = f"{GROUP}/{FILE}"
    if config_path.startswith(start):
        file = config_path.removeprefix(start)
        return f"{GROUP} {display_path(Path(file if file.endswith(SUFFIXES) else f'{file}.yaml'))}"
    if config_path.endswith(NEXT) and (held := sources_with(sources, config_path)):
        return f"{config_path.rstrip(NEXT)} ({owner_of(held[0], config_path)})"
    return config_path


def defaults_of(config: object) -> ListConfig:
    """The defaults list of a file; an empty one where it has none, or something else by that name."""
    found = config.get("defaults") if isinstance(config, DictConfig) else None
    return found if isinstance(found, ListConfig) else ListConfig([])


def _replace(config: object, name: str, following: str) -> None:
    """Let what a config extends by its own name be the `following` one of that name."""
    defaults = defaults_of(config)
    group = name.rpartition("/")[0]
    for index, entry in enumerate(defaults):
        if isinstance(entry, str):
            written, at, package = entry.partition("@")
            target = written[1:] if written.startswith("/") else f"{group}/{written}".lstrip("/")
            if target == name:
                defaults[index] = f"{written}{following.removeprefix(name)}{at}{package}"


class RunnerSearchPath(SearchPathPlugin):
    """Adds the user's folders, the shipped recipes and the plug-ins' to Hydra's search path."""

    extra: ClassVar[Path | None] = None  # --config-dir; Hydra makes the instance, so it has nowhere else to stand

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in search_path.get_path():
            if entry.provider == "main":
                entry.path = f"{ShippedSource.scheme()}://{conf_dir()}"
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
    for plugin in (FolderSource, RecipesSource, RecipeFileSource, ShippedSource, RunnerSearchPath):
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
