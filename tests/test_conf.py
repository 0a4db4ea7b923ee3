"""conf/ and recipes/: equal to the schema, complete, and runnable under the switches that the docs show."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf

from runner.cli.conf import files, main
from runner.cli.config_sources import hydra_session
from runner.cli.job import SERVER
from runner.cli.job_builder import compose_job
from runner.cli.main import main as run
from runner.core.package import conf_dir, recipes_dir
from runner.data.config import ChatConfig
from runner.spec.base import iter_leaves
from runner.spec.job import EvaluationConfig, JobSpec, WatchConfig
from runner.spec.registry import built_in_registry, default_registry
from runner.spec.schema import CALLBACKS, EVALUATION, groups_of
from runner.spec.tinker import TinkerConfig

GROUPS = groups_of(built_in_registry())
CONF = sorted((p.parent.name, p.stem) for p in conf_dir().glob("*/*.yaml") if p.parent.name != EVALUATION)
RECIPES = sorted(p.relative_to(recipes_dir()).with_suffix("").as_posix() for p in recipes_dir().rglob("*.yaml"))
REQUIRED = {"path": "some/where", "pattern": "a+b", "url": "http://localhost:1/score", "parts": "[{name: exact}]"}
REQUIRED |= {"teacher": "some/where"}
REQUIRED_OF = {"reward/function": {"path": "rate.py:score"}, "reward/length": {"target": "9"}}
REQUIRED_OF |= {"environment/function": {"path": "shop.py:Shop"}, "environment/agent": {"command": "python agent.py"}}
REQUIRED_OF |= {"environment/mcp": {"server": "python tools_server.py"}}
REQUIRED_OF |= {"sampler/server": {"url": "http://localhost:1", "weight_sync": "reload"}}


def required(group: str, name: str) -> dict[str, str]:
    """What has to be set of a conf file before it can be used."""
    content = plain(conf_dir() / group / f"{name}.yaml")
    wanted = {k: v for k, v in REQUIRED.items() if content.get(k) == "???"}
    return wanted | REQUIRED_OF.get(f"{group}/{name}", {})


def beside(group: str, name: str) -> list[str]:
    """The choices of other groups without which this one makes no job."""
    if f"{group}={name}" in ("algorithm=tinker", "data=none"):
        return [f"{g}={n}" for g, n in SERVER.items() if g not in (group, "name")]
    samples = group == "algorithm" and class_of(name).needs_sampler
    uses = samples or (group in ("sampler", "reward", "environment") and name != "none") or name == "ray_6_2"
    chosen = {"model": "tiny", "data": "demo", "adapter": "lora" if name == "qwen2_5_7b_instruct" else "none"}
    if uses:
        reward = "exact" if group != "algorithm" or class_of(name).needs_reward else "none"
        chosen |= {"algorithm": "grpo", "sampler": "torch", "reward": reward}
    if f"{group}={name}" == "reward=environment":  # whose score it is
        chosen |= {"environment": "function", "environment.path": "shop.py:Shop"}
    if group == "parallelism" and name != "single":
        chosen["launch.devices"] = "4"
        chosen["model"] = "tiny_moe" if name == "ep" else "tiny"
    if group == "launch" and name.startswith(("local_", "ray_")):
        chosen["parallelism"] = "ddp"
    return [f"{g}={n}" for g, n in chosen.items() if g != group]


def class_of(name: str) -> Any:
    """The config class of an algorithm, or of what it is a preset of."""
    path = conf_dir() / "algorithm" / f"{name}.yaml"
    base = next((str(d) for d in plain(path).get("defaults", []) if isinstance(d, str) and d != "_self_"), name)
    return default_registry().classes("algorithm")[base]


def plain(path: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return {str(k): v for k, v in content.items()}


def test_the_generated_files_are_up_to_date() -> None:
    """To fix: python -m runner.cli.conf --write"""
    assert [str(p) for p, text in files() if p.read_text(encoding="utf-8") != text] == []
    assert main(["--check"]) == 0


@pytest.mark.parametrize(
    ("group", "cls"),
    [(g, c) for g in GROUPS for c in built_in_registry().classes(g).values()],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_components_file_lists_every_option_with_its_default(group: str, cls: Any) -> None:
    content = plain(conf_dir() / group / f"{cls.component_name()}.yaml")
    assert list(content) == ["name", *(f for f in cls.model_fields if f != "name")]
    wanted: dict[str, Any] = {k: v for k, v in required(group, cls.component_name()).items() if content[k] == "???"}
    if "parts" in wanted:
        wanted["parts"] = [{"name": "exact"}]
    assert cls.model_validate(content | wanted) == cls(**wanted)


def test_the_job_file_lists_every_group_and_every_default() -> None:
    content = plain(conf_dir() / "job.yaml")
    chosen = [key for entry in content.pop("defaults") if isinstance(entry, dict) for key in entry]
    assert chosen == sorted([*GROUPS, CALLBACKS, EVALUATION], key=chosen.index)
    assert set(GROUPS) <= set(chosen)
    del content["hydra"]
    assert EvaluationConfig(**content.pop("evaluation")) == EvaluationConfig()
    assert WatchConfig(**content.pop("watch")) == WatchConfig()
    assert ChatConfig(**content.pop("chat")) == ChatConfig()
    assert TinkerConfig(**content.pop("tinker")) == TinkerConfig()
    assert content == {
        k: JobSpec.model_fields[k].default for k in ("name", "seed", "steps", "epochs", "init_from", "strict")
    }


@pytest.mark.parametrize("model", [JobSpec, ChatConfig, EvaluationConfig, WatchConfig, TinkerConfig])
def test_the_job_file_comments_each_of_its_options(model: Any) -> None:
    lines = [line.strip() for line in (conf_dir() / "job.yaml").read_text(encoding="utf-8").splitlines()]
    for name, info in model.model_fields.items():
        if name not in (*GROUPS, CALLBACKS):
            assert any(a == f"# {info.description}" and b.startswith(f"{name}:") for a, b in pairwise(lines)), name


@pytest.mark.parametrize(("group", "name"), CONF)
def test_every_conf_file_composes_and_decodes(group: str, name: str, workdir: Path) -> None:
    missing = [f"{group}.{k}={v}" for k, v in required(group, name).items()]
    spec = compose_job([*beside(group, name), f"{group}={name}", *missing]).spec
    assert getattr(spec, group).name in default_registry().classes(group)
    assert (conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_is_short_and_says_what_to_expect(recipe: str, workdir: Path) -> None:
    assert compose_job([f"+recipe={recipe}"]).spec.name == recipe
    lines = (recipes_dir() / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0] == "# yaml-language-server: $schema=.schema.json"
    assert lines[1] == "# @package _global_"
    assert lines[2].startswith("# ")


def test_the_printed_schema_is_the_shipped_one_with_the_plug_ins(
    capsys: pytest.CaptureFixture[str], workdir: Path
) -> None:
    assert run(["schema", "recipe"]) == 0
    printed = json.loads(capsys.readouterr().out)["$defs"]
    shipped = json.loads((recipes_dir() / ".schema.json").read_text(encoding="utf-8"))["$defs"]
    own, every = built_in_registry(), default_registry()
    theirs = {cls.__name__ for g in GROUPS for name, cls in every.classes(g).items() if name not in own.classes(g)}
    assert printed.items() >= shipped.items()
    assert printed.keys() - shipped.keys() == theirs


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_what_its_schema_says(recipe: str) -> None:
    schema = json.loads((recipes_dir() / ".schema.json").read_text(encoding="utf-8"))
    content = plain(recipes_dir() / f"{recipe}.yaml")
    [choices] = [o["properties"] for o in schema["properties"]["defaults"]["items"]["anyOf"] if o["type"] == "object"]
    for entry in content.pop("defaults"):
        [(key, value)] = entry.items()
        assert value in choices[key]["enum"]
    for key, _ in iter_leaves(content):
        section, _, leaf = key.partition(".")
        assert section in schema["properties"]
        if leaf:
            field = schema["properties"][section]
            names = [o["$ref"].rpartition("/")[2] for o in field.get("anyOf", [field])]
            assert any(leaf in schema["$defs"][name]["properties"] for name in names), key


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_sets_only_what_every_member_of_a_group_has(recipe: str) -> None:
    """So that switching a group never meets leftovers of the recipe's own making; `none` has no options at all."""
    content = plain(recipes_dir() / f"{recipe}.yaml")
    del content["defaults"]
    for group in set(GROUPS) - {"algorithm"}:
        members = [cls for name, cls in default_registry().classes(group).items() if name != "none"]
        assert [k for k in content.get(group, {}) if not all(k in cls.model_fields for cls in members)] == []


@pytest.mark.parametrize(
    "words",
    [
        "+recipe=sft_npu device=cpu model=tiny data=demo tracker=none",
        "device=cpu +recipe=sft_npu model=tiny adapter=none data=demo",
        "+recipe=sft_npu data=file data.path=x.jsonl model.gradient_checkpointing=false",
        "+recipe=sft_demo model=hf model.path=some/where",
        "+recipe=sft_demo data=file data.path=x.jsonl algorithm=cpt",
        "+recipe=sft_demo optimizer=sgd schedule=wsd tracker=none device=npu adapter=lora",
        "recipe=sft_demo model=qwen3_0_6b data=capybara",
        "algorithm=sft data=file data.path=my.jsonl model=hf model.path=some/where",
    ],
)
def test_switches(words: str, workdir: Path) -> None:
    spec = compose_job(words.split()).spec
    for word in words.split():
        group, _, name = word.partition("=")
        if group in GROUPS and name in default_registry().classes(group):
            assert getattr(spec, group).name == name


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["+recipe=[sft_demo]"],
        ["+recipe=[sft_demo]", "device=npu", "model=hf", "schedule=wsd"],
        ["+recipe=[sft_npu]"],
    ],
)
def test_our_composition_is_hydras(words: list[str], workdir: Path) -> None:
    with hydra_session(default_registry()):
        theirs = OmegaConf.to_container(compose("job", words))
    ours = compose_job([*words, "model.path=x"] if "model=hf" in words else words or ["model=tiny"]).data
    if "model=hf" in words:
        theirs["model"]["path"] = "x"  # type: ignore[index,call-overload]
    dtype = "float32" if ours["device"]["name"] == "cpu" else "bfloat16"
    theirs["model"]["dtype"] = dtype  # type: ignore[index,call-overload]  # null, which is the device's to say
    if theirs["name"] == "auto":  # type: ignore[index,call-overload]
        theirs["name"] = "tiny-demo"  # type: ignore[index,call-overload]
    theirs["callbacks"] = {}  # type: ignore[index,call-overload]  # none is chosen
    assert ours == theirs


def test_yaml_has_no_tabs_and_ends_in_a_newline() -> None:
    for path in [*conf_dir().rglob("*.yaml"), *recipes_dir().rglob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        assert "\t" not in text and text.endswith("\n") and yaml.safe_load(text), path
