"""Composition: who beats whom, where files come from, who set what, and every mistake of a command line at once."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import yaml

from runner.cli.job_builder import compose_job, re_decode
from runner.core.errors import EnvironmentProblem, RunnerError, SecurityError, SpecError
from runner.spec.registry import default_registry


def said(*words: str) -> dict[str, str]:
    """The problems of a command line: key → message."""
    return {p.key: p.message for p in problems(*words)}


def problems(*words: str) -> tuple:
    with pytest.raises(SpecError) as caught:
        compose_job(words)
    assert "To append" not in str(caught.value)
    return caught.value.problems


def recipe(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# --- what composes ---------------------------------------------------------------------------------------------------


def test_nothing_typed_is_the_demo_and_says_so(workdir: Path) -> None:
    bare, named = compose_job([]), compose_job(["+recipe=sft_demo"])
    assert bare.spec == named.spec and bare.overrides == named.overrides
    assert len(bare.notes) == 1 and "sft_demo" in bare.notes[0]
    assert named.notes == ()
    assert compose_job(["algorithm=cpt", "steps=30"]).spec.name == "sft_demo"


def test_choosing_data_or_model_means_no_demo(workdir: Path) -> None:
    spec = compose_job(["algorithm=sft", "data=file", "data.path=my.jsonl", "model=hf", "model.path=some/where"]).spec
    assert (spec.name, spec.optimizer.lr, spec.data.path) == ("where-my", None, "my.jsonl")


def test_a_model_that_was_taken_unasked_is_said(workdir: Path) -> None:
    own = ["data=file", "data.path=my.jsonl"]
    assert "with random weights" in compose_job(own).notes[0]
    assert compose_job([*own, "model=tiny"]).notes == compose_job(["data=demo"]).notes == ()


def test_the_home_folder_may_be_a_tilde(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir))
    assert compose_job(["data=file", "data.path=~/my.jsonl"]).spec.data.path == str(workdir / "my.jsonl")


@pytest.mark.parametrize(
    "words", [*permutations(["+recipe=sft_demo", "device=cuda", "optimizer.lr=0.5", "schedule=wsd"])]
)
def test_the_command_line_beats_the_recipe_in_any_order(words: tuple[str, ...], workdir: Path) -> None:
    composed = compose_job(words)
    spec = composed.spec
    assert (spec.device.name, spec.optimizer.lr, spec.schedule.name) == ("cuda", 0.5, "wsd")
    assert (spec.name, composed.origins["steps"]) == ("sft_demo", "recipe/sft_demo")
    assert composed.origins["optimizer.lr"] == "command line"


@pytest.mark.parametrize("word", ["recipe=sft_demo", "+recipe=sft_demo", "++recipe=sft_demo", "+recipe=[sft_demo]"])
def test_a_recipe_is_named_in_any_of_these_ways(word: str, workdir: Path) -> None:
    assert compose_job([word]).spec.name == "sft_demo"


@pytest.mark.parametrize("word", ["optimizer.lr=0.5", "+optimizer.lr=0.5", "++optimizer.lr=0.5", "optimizer={lr: 0.5}"])
def test_a_value_is_set_in_any_of_these_ways(word: str, workdir: Path) -> None:
    spec = compose_job([word]).spec
    assert (spec.optimizer.lr, spec.optimizer.name) == (0.5, "adamw")


def test_the_later_of_two_recipes_wins(workdir: Path) -> None:
    recipe(workdir / "recipes", "a", "steps: 11\nseed: 1\n")
    recipe(workdir / "recipes", "b", "steps: 22\n")
    ab, ba = compose_job(["+recipe=[a,b]"]).spec, compose_job(["+recipe=[b,a]"]).spec
    assert (ab.steps, ab.seed, ba.steps) == (22, 1, 11)


def test_who_set_what(workdir: Path) -> None:
    recipe(workdir / "recipes", "mine", "defaults: [sft_demo, override /model: qwen3_0_6b]\nseed: 4\n")
    origins = compose_job(["+recipe=mine", "steps=40", "evaluation={every: 5}"]).origins
    assert origins["steps"] == origins["evaluation.every"] == "command line"
    assert origins["seed"] == "recipe/mine"
    assert origins["optimizer.lr"] == "recipe/sft_demo"
    assert origins["model.path"] == "model/qwen3_0_6b"
    assert origins["model.batch_layout"] == "model/hf"
    assert origins["evaluation.logged_samples"] == "job"
    assert not [key for key in origins if key.startswith("hydra")]


# --- the user's own folders ------------------------------------------------------------------------------------------


def test_own_recipes_nested_ones_too_and_without_a_header(workdir: Path) -> None:
    recipe(workdir / "recipes", "mine", "defaults: [sft_demo]\nsteps: 77\n")
    recipe(workdir / "recipes", "math/deep", "# @package _global_\ndefaults: [/recipe/mine]\nseed: 5\n")
    assert compose_job(["+recipe=mine"]).spec.steps == 77
    deep = compose_job(["+recipe=math/deep"])
    assert (deep.spec.steps, deep.spec.seed, deep.origins["seed"]) == (77, 5, "recipe/math/deep")


def test_own_conf_adds_presets(workdir: Path) -> None:
    recipe(workdir / "conf/data", "mine", "defaults: [file, _self_]\npath: here.jsonl\n")
    composed = compose_job(["data=mine"])
    assert composed.spec.data.path == "here.jsonl"
    assert composed.origins["data.path"] == "data/mine"


def test_a_preset_without_a_component_is_told_to_extend_one(workdir: Path) -> None:
    recipe(workdir / "conf/data", "mine", "path: my.jsonl\neval_path: held_out.jsonl\n")
    [problem] = problems("data=mine")
    assert (problem.key, problem.origin) == ("data", "data/mine")
    assert "'defaults: [file, _self_]'" in problem.message


def test_a_name_that_is_unknown_hides_what_only_its_stand_in_is_wrong_for() -> None:
    with pytest.raises(SpecError) as caught:
        compose_job(["parallelism=megatron", "launch.devices=2"])
    assert [problem.key for problem in caught.value.problems] == ["parallelism"]


def test_config_dir_adds_groups_and_recipes(workdir: Path, tmp_path: Path) -> None:
    more = tmp_path / "elsewhere"
    recipe(more / "optimizer", "hot", "defaults: [sgd, _self_]\nlr: 3.0\n")
    recipe(more / "recipe", "from_group", "# @package _global_\nsteps: 31\n")
    recipe(more / "recipes", "from_folder", "steps: 32\n")
    assert compose_job(["optimizer=hot", "model=tiny"], more).spec.optimizer.lr == 3.0
    assert compose_job(["+recipe=from_group"], more).spec.steps == 31
    assert compose_job(["+recipe=from_folder"], more).spec.steps == 32
    with pytest.raises(SpecError, match="no optimizer named 'hot'"):
        compose_job(["optimizer=hot"])
    with pytest.raises(EnvironmentProblem, match="no such folder"):
        compose_job([], tmp_path / "nowhere")


# --- mistakes of the command line ------------------------------------------------------------------------------------


def test_all_mistakes_of_a_command_line_come_together(workdir: Path) -> None:
    found = problems("+recipe=sft_demo", "optimizer.lrr=1", "device=gpu", "data.max_lenght=x")
    devices = ", ".join(sorted(default_registry().classes("device")))
    assert {p.key: p.message for p in found} == {
        "device": f"no device named 'gpu'; did you mean 'cuda'? ({devices})",
        "optimizer.lrr": "not an option of optimizer=adamw; did you mean 'lr'?",
        "data.max_lenght": "not an option of data=demo; did you mean 'max_length'?",
    }
    assert {p.origin for p in found} == {"command line"}
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "key", "message"),
    [
        ("device=cpuu", "device", "no device named 'cpuu'; did you mean 'cpu'?"),
        ("device=null", "device", "no device named 'null'"),
        ("tracker=null", "tracker", "did you mean 'none'?"),
        ("device=[cpu,npu]", "device", "takes one choice"),
        ("+recipe=sft_dmo", "recipe", "no recipe named 'sft_dmo'; did you mean 'sft_demo'?"),
        ("+recipe=[sft_demo,nope]", "recipe", "no recipe named 'nope'"),
        ("model=/models/x", "model", "to set a path, type model=hf model.path=/models/x"),
        ("data=my.jsonl", "data", "to set a path, type data=file data.path=my.jsonl"),
        ("device.name=npu", "device.name", "select a component with device=npu"),
        ("optimizer={name: sgd}", "optimizer.name", "select a component with optimizer=sgd"),
        ("+recipe=recipes/mine.yaml", "recipe", "no file recipes/mine.yaml: there is no folder recipes"),
        ("data.path=a,b", "data.path", "type a list as 'data.path=[a,b]'"),
        ("name=my run", "name", "expected a text of at most 80 letters, digits, '.', '_' and '-'"),
        ("model.dtype=bf16", "model.dtype", "did you mean 'bfloat16'?"),
        ("model.quantization=int4", "model.quantization", "did you mean 'nf4'?"),
        ("output_dir=x", "output_dir", "runs are written to ./outputs"),
        ("steps", "steps", "not an override; type steps=VALUE"),
        ("exp/mine.yaml", "exp/mine.yaml", "not an override; to use a recipe file, type +recipe=exp/mine.yaml"),
        ("steps=1,2", "steps", "a sweep over several values, type: run -m"),
        ("seed=range(1,3)", "seed", "a sweep over several values, type: run -m"),
        ("sweep.parallel=2", "sweep.parallel", "is an option of a sweep"),
        ("~tracker", "~tracker", "an option cannot be removed"),
        ("hydra.run.dir=x", "hydra.run.dir", "Hydra's own settings are not used"),
        ("hydra/launcher=x", "hydra/launcher", "Hydra's own settings are not used"),
        ("optimizer/x=3", "optimizer/x=3", "there is no such group"),
        ("optimizer@foo=sgd", "optimizer@foo=sgd", "no option optimizer@foo"),
        ("data.path=a(b", "data.path", "quote it: 'data.path=\"a(b\"'"),
        ("foo=1", "foo", "not an option of a job"),
        ("o=1", "o", "not an option of a job"),
        ("+foo.bar=1", "foo", "not an option of a job"),
        ("optimizer.lr.x=1", "optimizer.lr", 'expected a number above 0 or null, got {"x": 1}'),
        ("optimizer.betas.0=x", "optimizer.betas", "expected a list of 2 numbers"),
        ("evaluation=5", "evaluation", "no evaluation named '5' (aime, "),
        ("name=${nope}", "name", "${nope}: Interpolation key 'nope' not found"),
        ("name=${oc.env:NOT_SET_ANYWHERE}", "name", "not found"),
        ("steps=???", "steps", "must be given"),
    ],
)
def test_one_mistake(word: str, key: str, message: str, workdir: Path) -> None:
    found = said("+recipe=sft_demo", word) if "recipe" not in word else said(word)
    assert list(found) == [key]
    assert message in found[key]


@pytest.mark.parametrize(
    "pair", [("device=cpu", "device=npu"), ("steps=1", "++steps=1"), ("+recipe=sft_demo", "recipe=sft_npu")]
)
def test_the_same_key_twice_is_an_error(pair: tuple[str, str], workdir: Path) -> None:
    assert "set twice, as " + " and as ".join(pair) in next(iter(said(*pair, "model=tiny", "data=demo").values()))


def test_a_wrong_choice_does_not_blame_what_belongs_to_it(workdir: Path) -> None:
    assert set(said("model=qqq", "model.path=/x", "data=demo", "model.zzz=1")) == {"model", "model.zzz"}


def test_switching_a_group_names_what_the_recipe_left_behind(workdir: Path) -> None:
    recipe(workdir / "recipes", "mine", "defaults: [override /optimizer: sgd]\noptimizer:\n  momentum: 0.9\n")
    assert compose_job(["+recipe=mine"]).spec.optimizer.momentum == 0.9
    [problem] = problems("+recipe=mine", "optimizer=adamw")
    assert str(problem.message).startswith("not an option of optimizer=adamw; an option of optimizer=sgd")
    assert (problem.key, problem.origin) == ("optimizer.momentum", "recipe/mine")


# --- mistakes in files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("defaults: [override /device: gpu]", "device", "no device named 'gpu'; did you mean 'cuda'?"),
        ("defaults: [device: npu]", "device", "a recipe selects with 'override /device: npu'"),
        ("defaults: [/device: npu]", "device", "a recipe selects with 'override /device: NAME'"),
        ("defaults: [override device: npu]", "device", "a recipe selects with 'override /device: NAME'"),
        ("defaults: [override /devise: npu]", "devise", "no such group; did you mean 'device'?"),
        ("defaults: [nope]", "recipe", "no recipe named 'nope'"),
        ("optimizer:\n  lrr: 1", "optimizer.lrr", "did you mean 'lr'?"),
        ("optimizer:\n  name: sgd", "optimizer.name", "a file selects with 'override /optimizer: sgd'"),
        ("optimizer: 3", "optimizer", "expected a section of options"),
        ("hydra:\n  run:\n    dir: x", "hydra.run.dir", "Hydra's own settings are not used"),
        ("name: ${oc.env:NOT_SET_ANYWHERE}", "name", "not found"),
        ("1: 2", "1", "not an option of a job"),
    ],
)
def test_one_mistake_in_a_recipe_names_the_file(text: str, key: str, message: str, workdir: Path) -> None:
    recipe(workdir / "recipes", "bad", text + "\n")
    [problem] = problems("+recipe=bad", "model=tiny")
    assert (problem.key, problem.origin) == (key, "recipe/bad")
    assert message in problem.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", r"broken YAML: .*recipes/bad\.yaml\", line 1"),
        (b"a: 1\na: 2", "recipes/bad.yaml"),
        (b'name: "\xff"', "recipes/bad.yaml:1: not UTF-8"),
        (b"- 1", "expected the sections of a job"),
        (b"defaults: [bad]", "in a cycle"),
        (b"defaults: 3", "defaults"),
        (b"3", "recipes/bad.yaml: expected options"),
        (b"# @package a b", "recipes/bad.yaml: Too many components"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes, message: str, workdir: Path) -> None:
    recipe(workdir / "recipes", "bad", "")
    (workdir / "recipes" / "bad.yaml").write_bytes(content)
    with pytest.raises(SpecError, match=message):
        compose_job(["+recipe=bad"])


def test_a_recipe_cannot_leave_its_folder(workdir: Path) -> None:
    (workdir / "recipes").mkdir()
    recipe(workdir, "outside", "steps: 3\n")
    assert "no recipe named" in said("+recipe=../outside")["recipe"]


# --- security --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["model._target_=os.system", "+x={_target_: os.system}", "x=[{_target_: a}]"])
def test_code_named_on_the_command_line_is_refused(word: str, workdir: Path) -> None:
    with pytest.raises(SecurityError):
        compose_job([word])


@pytest.mark.parametrize(
    "text",
    ["${oc.env:HUB_TOKEN}", "${oc.env:my_api_key,x}", "${oc.decode:${oc.env:${which}}}", "a ${ oc.env : A_SECRET }"],
)
def test_secrets_are_not_read_into_a_spec(text: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HUB_TOKEN", "my_api_key", "DB_PASSWORD", "A_SECRET"):
        monkeypatch.setenv(name, "s3cr3t")
    recipe(workdir / "recipes", "leak", f'name: "{text}"\nwhich: DB_PASSWORD\n')
    with pytest.raises(RunnerError) as caught:
        compose_job(["+recipe=leak"])
    assert isinstance(caught.value, SecurityError)
    assert "s3cr3t" not in str(caught.value)


def test_other_variables_and_interpolations_resolve(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "ada")
    spec = compose_job(["name=${oc.env:WHO}-${seed}", "evaluation.every=${checkpoint.every}", "seed=7"]).spec
    assert (spec.name, spec.evaluation.every) == ("ada-7", 50)


def test_typed_steps_that_epochs_of_a_recipe_replace_are_refused(workdir: Path) -> None:
    recipe(workdir / "recipes", "ep", "epochs: 3\n")
    with pytest.raises(SpecError, match=r"steps: 20, but epochs=3 decides \(set by: recipe/ep\); leave it out, or"):
        compose_job(["+recipe=ep", "steps=20"])
    assert compose_job(["+recipe=ep", "steps=20", "epochs=null"]).spec.steps == 20


def test_trusting_a_models_code_takes_the_command_line(workdir: Path) -> None:
    recipe(
        workdir / "recipes",
        "trusting",
        "defaults: [override /model: hf]\nmodel: {path: x/y, trust_remote_code: true}\n",
    )
    with pytest.raises(SecurityError, match="recipe/trusting"):
        compose_job(["+recipe=trusting"])
    assert compose_job(["+recipe=trusting", "model.trust_remote_code=true"]).spec.model.trust_remote_code


# --- a run's spec.yaml -----------------------------------------------------------------------------------------------


@pytest.fixture
def spec_yaml(workdir: Path) -> Path:
    path = workdir / "spec.yaml"
    spec = compose_job(["+recipe=sft_demo"]).data
    spec["tracker"]["tags"] = ["${literally}"]
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


def test_a_spec_file_is_the_job_again(spec_yaml: Path) -> None:
    again = re_decode(spec_yaml, [])
    assert again.data == yaml.safe_load(spec_yaml.read_text())
    assert again.spec.tracker.tags == ("${literally}",)
    assert set(again.origins.values()) == {"spec.yaml"}


def test_overrides_on_a_spec_file(spec_yaml: Path) -> None:
    composed = re_decode(spec_yaml, ["steps=400", "tracker=none", "+evaluation.every=7", "name=${model.name}"])
    spec = composed.spec
    assert (spec.steps, spec.tracker.name, spec.evaluation.every, spec.name) == (400, "none", 7, "tiny")
    assert composed.origins["steps"] == "command line"
    assert composed.origins["optimizer.lr"] == "spec.yaml"
    assert not [key for key in composed.origins if key.startswith("tracker.") and key != "tracker.name"]


def test_a_set_is_added_to_a_spec_file_and_nothing_else_changes(spec_yaml: Path) -> None:
    own = {"every": 7, "max_new_tokens": 30, "sets": {"own": {"data": {"name": "demo"}}}}
    saved = yaml.safe_load(spec_yaml.read_text())
    spec_yaml.write_text(yaml.safe_dump({**saved, "evaluation": {**saved["evaluation"], **own}}))
    composed = re_decode(spec_yaml, ["+evaluation=[format,arithmetic]", "evaluation.sets.format.max_new_tokens=9"])
    found = composed.spec.evaluation
    assert (found.every, found.max_new_tokens, [*found.sets]) == (7, 30, ["own", "format", "arithmetic"])
    assert found.sets["own"] == own["sets"]["own"] and found.sets["format"]["max_new_tokens"] == 9
    assert composed.origins["evaluation.every"] == "spec.yaml"


def test_mistakes_on_a_spec_file(spec_yaml: Path) -> None:
    with pytest.raises(SpecError) as caught:
        re_decode(spec_yaml, ["stepz=4", "device=gpu", "+recipe=sft_npu", "optimizer.lr=x"])
    assert {p.key for p in caught.value.problems} == {"stepz", "device", "recipe", "optimizer.lr"}


@pytest.mark.parametrize("text", ["a: [1", "- 1\n", ""])
def test_a_broken_spec_file_is_a_problem(text: str, workdir: Path) -> None:
    (workdir / "spec.yaml").write_text(text)
    with pytest.raises(SpecError):
        re_decode(workdir / "spec.yaml", [])
    with pytest.raises(EnvironmentProblem):
        re_decode(workdir / "nowhere.yaml", [])


def test_what_a_recipe_leaves_over_has_a_way_out(workdir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job(["+recipe=grpo_demo", "algorithm=dpo", "~algorithm.group_size"])
    said = {p.key: p.message for p in caught.value.problems}
    assert said["algorithm.group_size"].endswith(
        "the recipe sets it: remove it from grpo_demo, or from a copy of it in ./recipes, "
        "or use a recipe for algorithm=dpo (run list recipes)"
    )
    assert "null" not in said["~algorithm.group_size"] and "./recipes" in said["~algorithm.group_size"]
    with pytest.raises(SpecError) as caught:
        compose_job(["+recipe=grpo_demo", "algorithm=dpo", "sampler=none", "reward=none"])
    ways = ["the recipe sets it" in p.message for p in caught.value.problems]
    assert ways == [True, False], "said once, of the algorithm: the rest follows from it"
