"""Interpolations: all of them are resolved at the start, and none of them may read a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.errors import Problem, SecurityRefusal
from runner.spec.decode import MISSING
from runner.spec.origin import leaves, origin_of

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def resolve(config: DictConfig, origins: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """`config` as plain data, and a problem for each interpolation that cannot be resolved (it is left as `???`).

    Raises SecurityRefusal if one reads an environment variable that looks like a secret.
    """
    data: dict[str, Any] = {}
    problems = []
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    with _guarded_environment():
        for key, value in leaves(raw):
            if "${" in str(value):
                try:
                    value = _value(config, key)
                except OmegaConfBaseException as error:
                    _raise_refusal(error, key, origins)
                    why = str(error).splitlines()[0].rpartition("raised while resolving interpolation: ")[2]
                    problems.append(Problem(key, f"{value}: {why}", origin_of(key, origins)))
                    value = MISSING
            _put(data, key, value)
    return data, problems


def escaped(value: Any) -> Any:
    """Plain data as a config whose texts mean themselves."""
    if isinstance(value, dict):
        return {name: escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _value(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        data = data.setdefault(name, {})
    data[last] = value


def _environment(name: str, *default: str) -> Any:
    if SECRET.search(name):
        raise SecurityRefusal(
            f"${{oc.env:{name}}} looks like a secret, which would be written to spec.yaml and sent to trackers; "
            "libraries read it from the environment themselves"
        )
    return oc.env(name, *default)


@contextmanager
def _guarded_environment() -> Iterator[None]:
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _raise_refusal(error: BaseException | None, key: str, origins: Mapping[str, str]) -> None:
    while error is not None:
        if isinstance(error, SecurityRefusal):
            raise SecurityRefusal(f"{key}: {error}  [{origin_of(key, origins)}]") from None
        error = error.__cause__ or error.__context__
