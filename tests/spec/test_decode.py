"""The decoder: every problem at once, in the user's words, with who set it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from runner.core.errors import SecurityError, SpecError
from runner.data.config import FileConfig
from runner.optimizer.config import OptimizerConfig
from runner.reward.config import ExactConfig
from runner.spec.decode import decode
from runner.spec.registry import Registry, default_registry
from runner.spec.schema import groups_of, job_schema
from runner.tracker.config import WandbConfig

DEVICES = ", ".join(sorted(default_registry().classes("device")))
NAMES = {
    "device": "cpu",
    "parallelism": "single",
    "launch": "local",
    "model": "tiny",
    "adapter": "none",
    "data": "demo",
    "algorithm": "sft",
    "sampler": "none",
    "reward": "none",
    "environment": "none",
    "optimizer": "adamw",
    "schedule": "constant",
    "tracker": "none",
    "checkpoint": "safetensors",
}


def job(**changes: Any) -> dict[str, Any]:
    """A job with every group's default component, and `changes`; a section without a name keeps its component."""
    data: dict[str, Any] = {group: {"name": name} for group, name in NAMES.items()}
    for key, value in changes.items():
        data[key] = data[key] | value if key in data and isinstance(value, dict) else value
    return data


def said(**changes: Any) -> dict[str, str]:
    """What is said of a wrong job: key → message."""
    with pytest.raises(SpecError) as caught:
        decode(job(**changes), {})
    return {p.key: p.message for p in caught.value.problems}


def test_defaults_decode_to_the_classes_of_their_names() -> None:
    spec = decode(job(), {})
    assert {g: getattr(spec, g).name for g in NAMES} == NAMES
    assert type(spec.optimizer) is default_registry().classes("optimizer")["adamw"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "tiny-demo"),
        ({"name": "mine"}, "mine"),
        ({"data": {"name": "file", "path": "/data/my rows/talks.v2.jsonl.gz"}}, "tiny-talks"),
        ({"data": {"name": "file", "path": ["chats/", "b.jsonl"]}}, "tiny-chats"),
        (
            {
                "model": {"name": "hf", "path": "modelscope:Qwen/Qwen3-0.6B"},
                "data": {"name": "hub", "path": "a/Gänse 1"},
            },
            "Qwen3-0.6B-G_nse_1",
        ),
    ],
)
def test_a_run_is_named_after_its_model_and_data(changes: dict[str, Any], name: str) -> None:
    assert decode({**job(), **changes}, {}).name == name


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"optimizer": {"lrr": 1}}, "optimizer.lrr", "not an option of optimizer=adamw; did you mean 'lr'?"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr", "expected a number above 0 or null, got 'fast'"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr", "expected a number above 0 or null, got -1"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr", "expected a number above 0 or null, got NaN"),
        ({"optimizer": {"clip_norm": "x"}}, "optimizer.clip_norm", "expected a number above 0 or null, got 'x'"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "expected a list of 2 numbers, got [0.9]"),
        (
            {"device": {"name": "npu", "fused_ops": ["norm"]}},
            "device.fused_ops",
            'expected a list of some of rms_norm, rotary, swiglu, grouped_matmul, got ["norm"]',
        ),
        (
            {"optimizer": {"momentum": 0.9}},
            "optimizer.momentum",
            "not an option of optimizer=adamw; an option of optimizer=sgd, optimizer=muon",
        ),
        (
            {"device": {"name": "gpu"}},
            "device",
            f"no device named 'gpu'; did you mean 'cuda'? ({DEVICES})",
        ),
        (
            {"device": {"name": "ascend"}},
            "device",
            f"no device named 'ascend'; did you mean 'npu'? ({DEVICES})",
        ),
        ({"device": {"threads": True}}, "device.threads", "expected an integer at least 1, got true"),
        ({"data": {"max_lenght": 3}}, "data.max_lenght", "not an option of data=demo; did you mean 'max_length'?"),
        (
            {"data": {"truncation": "cut"}},
            "data.truncation",
            "expected one of error, skip, truncate_left, truncate_right, split, got 'cut'",
        ),
        ({"data": {"digits": 1}}, "data.digits", "expected an integer from 2 to 12, got 1"),
        ({"model": {"lr": 1}}, "model.lr", "not an option of model=tiny; did you mean 'optimizer.lr'?"),
        ({"adapter": {"rank": 8}}, "adapter.rank", "not an option of adapter=none; an option of adapter=lora"),
        ({"lora_rank": 8}, "lora_rank", "not an option of a job; type adapter=lora adapter.rank=8"),
        ({"learning_rate": 1}, "learning_rate", "not an option of a job; type optimizer.lr=1"),
        ({"devise": "cpu"}, "devise", "not an option of a job; did you mean 'device'?"),
        ({"steps": 1.5}, "steps", "expected an integer at least 1, got 1.5"),
        ({"steps": "???"}, "steps", "must be given: steps=…"),
        ({"evaluation": {"evry": 1}}, "evaluation.evry", "not an option of evaluation; did you mean 'every'?"),
        ({"evaluation": {"every": -1}}, "evaluation.every", "expected an integer at least 0, got -1"),
        ({"evaluation": 5}, "evaluation", "expected a section, got 5"),
        ({"optimizer": 3}, "optimizer", "expected a section of options, got 3"),
        ({"zzzzzz": 1}, "zzzzzz", "not an option of a job; for all options: run help options"),
        (
            {"algorithm": {"batch_size": 10, "mini_batches": 3}},
            "algorithm.mini_batches",
            "3 does not divide algorithm.batch_size=10",
        ),
        (
            {"launch": {"devices": 2}},
            "launch.devices",
            "parallelism=single runs one process, not 2; set launch.devices=1, or parallelism=ddp",
        ),
        (
            {"model": {"max_positions": 512}, "data": {"max_length": 1024}},
            "data.max_length",
            "1024 is above model.max_positions=512; lower data.max_length or raise model.max_positions",
        ),
        (
            {"schedule": {"name": "wsd", "warmup_steps": 60, "decay_steps": 50}},
            "schedule.decay_steps",
            "the sum of 50 and schedule.warmup_steps=60 is above steps=100",
        ),
        (
            {"checkpoint": {"best_mode": "min"}},
            "checkpoint.best_mode",
            "needs checkpoint.best; leave it out",
        ),
        (
            {"checkpoint": {"best": "train/tokens"}},
            "checkpoint.best_mode",
            "must be set to max or min, because checkpoint.best=train/tokens has no known direction",
        ),
        (
            {"checkpoint": {"best": "mine/x", "best_mode": "max"}},
            "checkpoint.best",
            "unknown metric (docs/metrics.md)",
        ),
    ],
)
def test_one_mistake_is_one_sentence(changes: dict[str, Any], key: str, message: str) -> None:
    assert said(**changes) == {key: message}


FILE = {"name": "file", "path": "x.jsonl"}


@pytest.mark.parametrize(
    ("condition", "option"),
    [
        ({"algorithm": {"name": "cpt"}, "data": FILE}, ("chat", "train_on", "last")),
        ({}, ("checkpoint", "best_mode", "min")),
    ],
    ids=str,
)
def test_an_option_that_the_rest_does_not_use_is_an_error(
    condition: dict[str, Any], option: tuple[str, str, Any]
) -> None:
    section, name, value = option
    decode(job(**condition), {})
    changes = {**condition, section: {**condition.get(section, {}), name: value}}
    assert set(said(**changes)) == {f"{section}.{name}"}


@pytest.mark.parametrize(
    ("device", "wanted"),
    [("cpu", "float32"), ("cuda", "bfloat16"), ("npu", "bfloat16")],
)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_model_computes_in_what_suits_its_device_unless_it_is_said(device: str, wanted: str, adapter: str) -> None:
    parts = {"device": {"name": device}, "adapter": {"name": adapter}}
    spec = decode(job(**parts), {})
    assert spec.model.dtype == wanted and spec.device.deterministic is (device == "cpu")
    assert spec.stored_dtype() == ("float32" if adapter == "none" else wanted)
    assert spec.stored_dtype(trains=False) == wanted
    said_so = decode(job(model={"dtype": "float32"}, **parts), {})
    assert said_so.model.dtype == said_so.stored_dtype() == "float32"


def test_all_problems_come_at_once_contradictions_among_them() -> None:
    found = said(
        optimizer={"lrr": 1},
        data={"max_lenght": 3},
        launch={"devices": 2},
        algorithm={"batch_size": 10, "mini_batches": 3},
    )
    assert set(found) == {"optimizer.lrr", "data.max_lenght", "launch.devices", "algorithm.mini_batches"}


def test_wrong_values_do_not_hide_contradictions_of_the_others() -> None:
    found = said(steps=-1, optimizer={"lr": -1}, algorithm={"batch_size": 10, "mini_batches": 3})
    assert set(found) == {"steps", "optimizer.lr", "algorithm.mini_batches"}


def test_a_contradiction_with_the_default_of_a_wrong_value_is_not_reported() -> None:
    schedule = {"name": "wsd", "warmup_steps": 300, "decay_steps": 200}
    assert set(said(steps=400, schedule=schedule)) == {"schedule.decay_steps"}
    assert set(said(steps=-1, schedule=schedule)) == {"steps"}


def test_an_unknown_component_does_not_hide_the_other_problems() -> None:
    found = said(device={"name": "gpu", "threads": "x"}, optimizer={"lr": 0}, steps=0)
    assert set(found) == {"device", "optimizer.lr", "steps"}


def test_a_missing_value_and_a_missing_group_are_named() -> None:
    data = job(data={"name": "file", "path": "???"})
    del data["tracker"]
    with pytest.raises(SpecError) as caught:
        decode(data, {"data.path": "data/file"})
    found = {p.key: (p.message, p.origin) for p in caught.value.problems}
    assert found["data.path"][0].startswith("must be given: data.path=…")
    assert found["data.path"][1] == "data/file"
    assert found["tracker"][0] == "no component is chosen; type tracker=NAME (none, swanlab, tensorboard, wandb)"
    assert said(data={"name": "file"})["data.path"].startswith("must be given")


def test_a_number_where_text_is_wanted_comes_with_the_remedy() -> None:
    assert said(name=12)["name"].endswith("got 12; to set it as text: 'name=\"12\"'")


def test_the_file_that_set_it_stands_beside_the_problem() -> None:
    with pytest.raises(SpecError) as caught:
        decode(job(optimizer={"momentum": 1}), {"optimizer.momentum": "recipe/x"})
    assert str(caught.value).endswith("[recipe/x]")


@pytest.mark.parametrize("where", [{"model": {"_target_": "os.system"}}, {"x": {"y": [{"_target_": "os.system"}]}}])
def test_naming_code_is_refused(where: dict[str, Any]) -> None:
    with pytest.raises(SecurityError, match="not code"):
        decode(job(**where), {})


@pytest.mark.parametrize(("origin", "allowed"), [("command line", True), ("recipe/x", False), ("spec.yaml", False)])
def test_a_models_own_code_is_trusted_on_the_command_line_only(origin: str, allowed: bool) -> None:
    data = job(model={"name": "hf", "path": "x/y", "trust_remote_code": True})
    origins = {"model.trust_remote_code": origin}
    if allowed:
        assert decode(data, origins).model.trust_remote_code
    else:
        with pytest.raises(SecurityError, match="only the command line"):
            decode(data, origins)


def test_the_one_bad_key_that_is_no_text_is_a_problem_not_a_crash() -> None:
    assert said(**{"optimizer": {1: 2}})["optimizer.1"].startswith("not an option of optimizer=adamw")


COMPONENTS = [
    (group, cls) for group in groups_of(default_registry()) for cls in default_registry().classes(group).values()
]


VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("reward", "length"): {"target": 3},
    ("reward", "function"): {"path": "x.py:y"},
    ("environment", "function"): {"path": "x.py:Y"},
    ("reward", "http"): {"url": "http://x/y"},
    ("sampler", "server"): {"url": "http://localhost:1", "weight_sync": "reload"},
    ("reward", "sum"): {"parts": ({**ExactConfig().model_dump(), "weight": 1.0},)},
}
SAMPLING = {
    group: {"name": name} for group, name in {"algorithm": "grpo", "sampler": "torch", "reward": "exact"}.items()
}


@pytest.mark.parametrize(("group", "cls"), COMPONENTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_dumped_spec_decodes_to_itself(group: str, cls: Any) -> None:
    name = cls.component_name()
    needed = {field: "x/y" for field, info in cls.model_fields.items() if info.is_required()}
    section = {"name": name, **VALUES.get((group, name), needed)}
    samples = cls.needs_sampler if group == "algorithm" else group in ("sampler", "reward", "environment")
    others = dict(SAMPLING) if samples and name != "none" else {}
    if group == "algorithm" and not cls.needs_reward:
        others.pop("reward", None)
    if "tinker" in (group, name) or (group, name) == ("data", "none"):
        others |= {"algorithm": {"name": "tinker"}, "data": {"name": "none"}, "adapter": {"name": "lora"}} | {
            "sampler": {"name": "torch"}
        }
    if (group, name) == ("reward", "environment"):
        others |= {"environment": {"name": "function", "path": "x.py:Y"}}
    if group == "parallelism" and name != "single":
        others |= {"launch": {"devices": 4}, "model": {"name": "tiny_moe" if name == "ep" else "tiny"}}
    spec = decode(job(**{**others, group: section}), {})
    assert decode(spec.model_dump(), {}) == spec
    assert decode(spec.model_dump(mode="json"), {}) == spec
    assert type(getattr(spec, group)) is cls


@given(
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(min_value=1e-300, allow_infinity=False, exclude_min=True),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    clip=st.none() | st.floats(1e-6, 1e6),
    tags=st.lists(st.text()).map(tuple),
    paths=st.text(min_size=1) | st.lists(st.text(min_size=1), min_size=1).map(tuple),
)
def test_any_spec_survives_dumping(steps, seed, lr, betas, clip, tags, paths) -> None:  # type: ignore[no-untyped-def]
    text = lambda value: "???" in (value if isinstance(value, tuple) else [value])  # noqa: E731
    if text(paths) or text(tags):
        return
    spec = decode(
        job(
            steps=steps,
            seed=seed,
            optimizer={"lr": lr, "betas": betas, "clip_norm": clip},
            tracker=WandbConfig(tags=tags).model_dump(),
            data=FileConfig(path=paths).model_dump(),
        ),
        {},
    )
    assert decode(spec.model_dump(mode="json"), {}) == spec


class Lion(OptimizerConfig):
    """A third party's optimizer."""

    factory: ClassVar[str] = "theirs:build"
    name: Literal["lion"] = "lion"
    beta: float = Field(default=0.9, gt=0, description="Theirs.")


def test_a_registered_component_is_decoded_and_in_the_schema() -> None:
    registry = Registry([*(cls for g in default_registry().groups() for cls in default_registry().classes(g).values())])
    registry.register(Lion)
    assert decode(job(optimizer={"name": "lion", "beta": 0.5}), {}, registry).optimizer == Lion(beta=0.5)
    union = job_schema(registry)["properties"]["optimizer"]
    assert union["discriminator"]["mapping"].keys() == {"adamw", "adamw8bit", "muon", "sgd", "lion"}
    with pytest.raises(SpecError, match="did you mean 'beta'"):
        decode(job(optimizer={"name": "lion", "betta": 0.5}), {}, registry)


def test_the_schema_describes_every_option_of_every_component() -> None:
    schema = job_schema()
    for group, cls in COMPONENTS:
        definition = schema["$defs"][cls.__name__]
        assert definition["additionalProperties"] is False
        assert set(definition["properties"]) == set(cls.model_fields), group


def test_a_copy_has_no_other_names() -> None:
    config = ExactConfig()
    assert config.model_copy() == config
    with pytest.raises(TypeError, match="ExactConfig has no option colum"):
        config.model_copy(update={"colum": "x"})
