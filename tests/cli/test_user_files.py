"""The user's files: what overrides and extends what, recipes by path, a search as a recipe, and what --info shows."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from runner.cli.expand_sweep import expand
from runner.cli.job_builder import ComposedJob, compose_job, re_decode
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.core.package import conf_dir
from runner.launch.upstream_runs import cache_folder, command_words

MINE = "defaults: [adamw, _self_]\nlr: 3.0e-4\n"


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def problem(*words: str) -> str:
    """The only problem of a command line, as it is printed."""
    with pytest.raises(SpecError) as caught:
        compose_job(words)
    [found] = caught.value.problems
    return f"{found.key}: {found.message}  [{found.origin}]"


@pytest.fixture
def plugin(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed plug-in's package."""
    monkeypatch.setattr("runner.cli.config_sources.plugin_folders", lambda: (("theirs", workdir / "theirs"),))
    return workdir / "theirs"


# --- a file of the same name -----------------------------------------------------------------------------------------


def test_a_file_of_the_users_overrides_the_shipped_one_and_says_so_once(workdir: Path) -> None:
    write(workdir / "conf/optimizer/adamw.yaml", "name: adamw\nlr: 9\n")
    composed = compose_job(["data=demo"])
    assert (composed.spec.optimizer.lr, composed.spec.optimizer.weight_decay) == (9, 0.0)
    assert composed.notes == ("conf/optimizer/adamw.yaml overrides the shipped optimizer/adamw",)


def test_a_file_may_extend_the_one_that_it_overrides(workdir: Path) -> None:
    write(workdir / "conf/optimizer/adamw.yaml", MINE)
    composed = compose_job(["data=demo"])
    assert (composed.spec.optimizer.lr, composed.spec.optimizer.betas) == (3e-4, (0.9, 0.95))
    assert composed.origins["optimizer.lr"] == "optimizer/adamw"
    assert composed.origins["optimizer.betas"] == "optimizer/adamw (shipped)"
    assert composed.notes == ("conf/optimizer/adamw.yaml extends the shipped optimizer/adamw",)


def test_a_recipe_may_extend_the_shipped_one_of_its_name(workdir: Path) -> None:
    write(workdir / "recipes/sft_demo.yaml", "defaults: [sft_demo, override /schedule: wsd]\nsteps: 7\n")
    write(workdir / "recipes/mine.yaml", "defaults: [sft_demo]\nseed: 3\n")
    composed = compose_job(["+recipe=mine"])
    spec = composed.spec
    assert (spec.steps, spec.seed, spec.schedule.name, spec.optimizer.lr) == (7, 3, "wsd", 2e-3)
    assert composed.notes == ("recipes/sft_demo.yaml extends the shipped recipe/sft_demo",)


def test_the_table_of_contents_can_be_extended_too(workdir: Path) -> None:
    write(workdir / "conf/job.yaml", "defaults: [job, _self_, override /tracker: none]\nsteps: 12\n")
    spec = compose_job(["data=demo"]).spec
    assert (spec.steps, spec.tracker.name, spec.evaluation.every) == (12, "none", 50)


def test_the_order_of_places(workdir: Path, plugin: Path) -> None:
    """--config-dir ▶ ./recipes ▶ ./conf ▶ shipped ▶ plug-ins: each extends the next one."""
    more = workdir / "more"
    for number, place in enumerate((more, workdir / "conf", plugin / "conf"), 1):
        write(place / "optimizer/adamw.yaml", f"defaults: [adamw, _self_]\nlr: 0.{number}\n")
        write(place / "optimizer/own.yaml", f"defaults: [sgd, _self_]\nmomentum: 0.{number}\n")
    for number, folder in enumerate(("more/recipes", "recipes", "conf/recipe"), 1):
        write(workdir / folder / "r.yaml", f"# @package _global_\ndefaults: [r, _self_]\nsteps: {number}\n")
    write(plugin / "recipes/r.yaml", "steps: 9\nseed: 7\n")
    composed = compose_job(["data=demo", "+recipe=r"], more)
    assert composed.notes == (
        "more/optimizer/adamw.yaml extends conf/optimizer/adamw.yaml",
        "conf/optimizer/adamw.yaml extends the shipped optimizer/adamw",
        "the shipped optimizer/adamw overrides theirs/conf/optimizer/adamw.yaml",
        "more/recipes/r.yaml extends recipes/r.yaml",
        "recipes/r.yaml extends conf/recipe/r.yaml",
        "conf/recipe/r.yaml extends theirs/recipes/r.yaml",
    )
    assert (composed.spec.steps, composed.spec.seed, composed.spec.optimizer.lr) == (1, 7, 0.1)
    for number, folder in enumerate((more, workdir / "conf", plugin / "conf"), 1):
        assert compose_job(["data=demo", "optimizer=own"], more).spec.optimizer.momentum == number / 10
        (folder / "optimizer/own.yaml").unlink()


def test_a_broken_file_that_is_overridden_harms_nobody(workdir: Path, plugin: Path) -> None:
    write(plugin / "conf/optimizer/adamw.yaml", "lr: [")
    assert compose_job(["data=demo"]).notes == (
        "the shipped optimizer/adamw overrides theirs/conf/optimizer/adamw.yaml",
    )


def test_a_copy_overrides_nothing(workdir: Path) -> None:
    write(workdir / "conf/optimizer/adamw.yaml", (conf_dir() / "optimizer/adamw.yaml").read_bytes())
    assert compose_job(["data=demo"]).notes == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adamw": b"lr: [1"}, "conf/optimizer/adamw.yaml"),
        ({"adamw": b'x: "\xff"'}, "conf/optimizer/adamw.yaml:1: not UTF-8 at byte offset 4 (0xff)"),
        ({"adamw": b"lr: 1"}, "start it with a line such as 'defaults: [adamw, _self_]'"),
        ({"adamw": b"defaults: [a]", "a": b"defaults: [adamw]"}, "optimizer/adamw ─▶ optimizer/a ─▶ optimizer/adamw"),
    ],
)
def test_what_is_wrong_with_a_file_in_conf_names_it(files: dict[str, bytes], said: str, workdir: Path) -> None:
    for name, content in files.items():
        write(workdir / f"conf/optimizer/{name}.yaml", content)
    assert said in problem("data=demo")


def test_a_byte_order_mark_hides_no_header(workdir: Path) -> None:
    write(
        workdir / "conf/optimizer/own.yaml", b"\xef\xbb\xbf# @package _global_\noptimizer:\n  lr: 0.5\n  name: adamw\n"
    )
    assert compose_job(["data=demo", "optimizer=own"]).spec.optimizer.lr == 0.5


def test_a_folder_where_a_file_should_be_is_said(workdir: Path) -> None:
    (workdir / "conf/optimizer/adamw.yaml").mkdir(parents=True)
    composed = compose_job(["data=demo"])
    assert composed.spec.optimizer.name == "adamw"
    assert composed.notes == ("conf/optimizer/adamw.yaml is a folder, not a file: not used",)


# --- a recipe by its path --------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_files(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(workdir))
    write(workdir / "my exp/base.yaml", "defaults: [sft_demo]\nsteps: 7\n")
    write(workdir / "my exp/child.yaml", "defaults: [base, override /schedule: wsd]\nseed: 5\n")
    write(workdir / "exp/sft_demo.yml", "defaults: [sft_demo]\nseed: 6\n")
    return workdir


@pytest.mark.parametrize(
    "word",
    [
        "my exp/child.yaml",
        "'my exp/child.yaml'",
        "{}/my exp/child.yaml",
        "~/my exp/child.yaml",
        "['my exp/child.yaml']",
    ],
)
def test_a_recipe_by_its_path(word: str, recipe_files: Path) -> None:
    composed = compose_job([f"+recipe={word.format(recipe_files)}"])
    assert (composed.spec.steps, composed.spec.seed, composed.spec.schedule.name) == (7, 5, "wsd")
    assert composed.origins["seed"] == "recipe my exp/child.yaml"
    assert composed.origins["optimizer.lr"] == "recipe/sft_demo"


def test_a_path_extends_a_recipe_of_its_own_name(recipe_files: Path) -> None:
    assert compose_job(["+recipe=exp/sft_demo.yml"]).spec.seed == 6


def test_paths_in_a_sweep_and_over_one_another(recipe_files: Path) -> None:
    members = expand(["+recipe=~/exp/sft_demo.yml,my exp/child.yaml", "name=a,b"]).members
    assert [m.composed.spec.seed for m in members] == [6, 6, 5, 5]
    write(recipe_files / "late.yaml", "seed: 9\n")
    assert compose_job(["+recipe=[~/exp/sft_demo.yml,late.yaml]"]).spec.seed == 9


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+recipe=exp/sft_dmo.yml", "no file exp/sft_dmo.yml; did you mean 'sft_demo.yml'? (in exp: sft_demo.yml)"),
        ("+recipe=exq/a/x.yaml", "no file exq/a/x.yaml: there is no folder exq/a (in .: dir.yaml/, exp/, my exp/)"),
        ("+recipe=dir.yaml", "dir.yaml is a folder, not a file"),
        ("+recipe=exp/x", "no recipe named 'exp/x'"),
        ("+recipe='my exp/base'", "to use a file, type +recipe=my exp/base.yaml"),
        ("init_from=recipe:exp/x.yaml", "init_from: no file exp/x.yaml"),
    ],
)
def test_a_path_without_a_recipe_is_answered_with_what_is_there(word: str, said: str, recipe_files: Path) -> None:
    (recipe_files / "dir.yaml").mkdir()
    assert said in problem(word)


def test_a_circle_of_files_is_shown(recipe_files: Path) -> None:
    write(recipe_files / "exp/a.yaml", "defaults: [b]\n")
    write(recipe_files / "exp/b.yaml", "defaults: [a]\n")
    found = problem("+recipe=exp/a.yaml")
    assert "in a cycle: recipe exp/" in found and "exp/a.yaml ─▶ recipe exp/b.yaml" in found


def test_what_a_file_chooses_wrongly_names_the_file(recipe_files: Path) -> None:
    write(recipe_files / "exp/bad.yaml", "defaults: [sft_demo, device: npu]\n")
    assert problem("+recipe=exp/bad.yaml").startswith("device: a recipe selects with 'override /device: npu'")
    write(recipe_files / "exp/bad.yaml", "optimizer:\n  momentum: 0.9\n")
    found = problem("+recipe=exp/bad.yaml")
    assert "remove it from exp/bad.yaml, or from a copy of it in ./recipes, or use a recipe" in found


def test_a_file_is_run_first_as_a_recipe_is(recipe_files: Path) -> None:
    composed: ComposedJob = compose_job(["data=demo", "init_from='recipe:my exp/child.yaml'"])
    words = command_words("my exp/child.yaml", composed.data, own_model=False)
    assert compose_job(words).spec.seed == composed.spec.seed
    assert cache_folder("my exp/child.yaml", words).parent == Path("outputs/stages/child")


# --- a search as a recipe --------------------------------------------------------------------------------------------

SEARCH = """defaults: [sft_demo, override /hydra/sweeper: optuna]
sweep:
  trials: 3
  over:
    optimizer.lr: tag(log,interval(1e-5,1e-2))
"""


def test_a_recipe_chooses_its_sweeper(workdir: Path) -> None:
    write(workdir / "recipes/my_search.yaml", SEARCH)
    expansion = expand(["+recipe=my_search"])
    assert (expansion.options.search, expansion.options.trials) == ("optuna", 3)
    assert [dimension.key for dimension in expansion.space] == ["optimizer.lr"]
    with pytest.raises(SpecError, match=r"needs sweep\.search"):
        expand(["+recipe=my_search", "optimizer.lr=0.1,0.2", "hydra/sweeper=basic"])
    notes = compose_job(["+recipe=my_search"]).notes
    assert notes == ("recipe/my_search: its section sweep is for run -m; this is one run",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: [override /hydra/sweeper: otuna]", "no hydra/sweeper named 'otuna'; did you mean 'optuna'?"),
        ("defaults: [override hydra/sweeper: optuna]", "'override /hydra/sweeper: NAME'"),
        ("hydra: {sweeper: {n_trials: 3}}", "Hydra's own settings are not used; type sweep.trials"),
    ],
)
def test_a_sweeper_that_is_not_there(text: str, said: str, workdir: Path) -> None:
    write(workdir / "recipes/bad.yaml", text)
    assert said in problem("+recipe=bad")


# --- what was composed -----------------------------------------------------------------------------------------------


def test_the_defaults_list_names_files(recipe_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(recipe_files / "conf/optimizer/adamw.yaml", MINE)
    assert main(["--info", "defaults", "+recipe=my exp/base.yaml"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer/adamw", "optimizer", "conf/optimizer/adamw.yaml", "job"] in rows
    assert rows[-3][-2:] == ["exp/base.yaml", "job"]
    assert "extends the shipped optimizer/adamw" in " ".join(rows[-1])


def test_the_search_path_is_in_order(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "conf").mkdir()
    (workdir / "more").mkdir()
    assert main(["--info", "searchpath", "--config-dir", "more"]) == 0
    providers = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    plug_ins = sorted(point.name for point in entry_points(group="runner.conf"))
    assert providers == ["hydra", "--config-dir", "you", "shipped", "shipped", *plug_ins, "+recipe=FILE", "components"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--info", "config"], "run --cfg job"),
        (["--info", "all"], "--info defaults"),
        (["--info", "plugins"], "run list"),
        (["--info", "defaults-tree"], "--info defaults"),
        (["--info", "nonsense"], "--info defaults or --info searchpath"),
        (["-m", "--info", "defaults"], "leave --multirun"),
        (["--info", "defaults", "--cfg", "job", "--folder", "here"], "leave --cfg and --folder out"),
        (["--info", "defaults", "+recipe=nope"], "no recipe named 'nope'"),
    ],
)
def test_other_words_after_info(words: list[str], said: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_the_shipped_sweeper_is_one_option(workdir: Path) -> None:
    assert yaml.safe_load((conf_dir() / "hydra/sweeper/optuna.yaml").read_text()) == {"sweep": {"search": "optuna"}}


# --- a second model --------------------------------------------------------------------------------------------------

TAUGHT = ("algorithm=opd", "sampler=torch", "data=demo", "model=tiny")
COMPARED = ("algorithm=dpo", "data=demo", "model=tiny")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*TAUGHT, "model@algorithm.teacher=qwen3_0_6b"), {"teacher": "Qwen/Qwen3-0.6B", "teacher_dtype": None}),
        ((*TAUGHT, "+model@algorithm.teacher=hf", "algorithm.teacher.path=/m"), {"teacher": "/m"}),
        (
            (*TAUGHT, "model@algorithm.teacher=hf", "algorithm.teacher={path: o/m, revision: v1, dtype: bfloat16}"),
            {"teacher": "o/m", "teacher_revision": "v1", "teacher_dtype": "bfloat16"},
        ),
        (("+recipe=distill_demo", "model@algorithm.teacher=qwen3_0_6b"), {"teacher": "Qwen/Qwen3-0.6B"}),
        (
            (*COMPARED, "model@algorithm.reference=qwen3_0_6b"),
            {"reference": None, "reference_path": "Qwen/Qwen3-0.6B", "reference_revision": None},
        ),
    ],
)
def test_a_second_model_becomes_its_owners_options(
    words: tuple[str, ...], expected: dict[str, object], workdir: Path
) -> None:
    data = compose_job(words).data["algorithm"]
    assert {name: data[name] for name in expected} == expected


def test_a_reward_model_and_who_set_it(workdir: Path) -> None:
    words = ["algorithm=grpo", "sampler=torch", "data=demo", "model=tiny", "reward=model"]
    composed = compose_job([*words, "model@reward.path=qwen3_0_6b"])
    assert composed.data["reward"]["path"] == "Qwen/Qwen3-0.6B"
    assert composed.origins["reward.path"] == "model/qwen3_0_6b"


def test_a_recipe_chooses_a_second_model_and_the_command_line_beats_it(workdir: Path) -> None:
    chosen = "/model@algorithm.teacher: mine, override /algorithm: opd, override /sampler: torch, override /data: demo"
    write(workdir / "recipes/taught.yaml", f"defaults: [{chosen}]\nalgorithm:\n  teacher:\n    revision: v1\n")
    write(workdir / "conf/model/mine.yaml", "defaults: [hf, _self_]\npath: o/m\n")
    mine = compose_job(["+recipe=taught"])
    assert (mine.spec.algorithm.teacher, mine.data["algorithm"]["teacher_revision"]) == ("o/m", "v1")
    assert mine.origins["algorithm.teacher_revision"] == "recipe/taught"
    other = compose_job(["+recipe=taught", "model@algorithm.teacher=qwen3_0_6b"])
    assert other.spec.algorithm.teacher == "Qwen/Qwen3-0.6B"
    again = workdir / "spec.yaml"
    again.write_text(yaml.safe_dump(mine.data))
    renewed = re_decode(again, ["model@algorithm.teacher=qwen3_0_6b", "algorithm.teacher_revision=null"])
    assert (renewed.spec.algorithm.teacher, renewed.origins["algorithm.teacher"]) == (
        "Qwen/Qwen3-0.6B",
        "model/qwen3_0_6b",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model@algorithm.teacher=hf", "algorithm.teacher: must be given: algorithm.teacher.path=…  [model/hf]"),
        (
            "model@algorithm.teacher=tiny",
            "model=tiny has random weights; a second model needs trained weights: model@algorithm.teacher=hf",
        ),
        ("algorithm.teacher.path=/m", "type model@algorithm.teacher=hf algorithm.teacher.path=…, or algorithm.teacher"),
        ("model@algorithm.teacher=qwen_0_6b", "no model named 'qwen_0_6b'; did you mean 'qwen3_0_6b'?"),
        ("model@algorithm.teacher=/m/x", "to set a path, type algorithm.teacher=/m/x"),
        (
            "model@algorithm.teacher=qwen3_0_6b algorithm.teacher.batch_layout=padded",
            "not used for a model that only scores",
        ),
        ("model@algorithm.teacher=qwen3_0_6b algorithm.teacher.trust_remote_code=true", "not used for a model"),
        (
            "model@algorithm.teacher=qwen3_0_6b algorithm.teacher.pth=x",
            "not an option of model=hf; did you mean 'path'",
        ),
        (
            "model@algorithm.teacher=qwen3_0_6b algorithm.teacher=/m",
            "set twice, as model@algorithm.teacher=qwen3_0_6b and as algorithm.teacher=/m; leave one of them out",
        ),
        ("algorithm.teacher=x model@algorithm.teachr=hf", "did you mean 'model@algorithm.teacher'?"),
        ("algorithm.teacher=x optimizer@x=sgd", "to set a second model, type model@algorithm.reference, model@"),
        (
            "model@algorithm.teacher=hf algorithm.teacher={path: a/b, revision: x} algorithm.teacher_revision=y",
            "is y, but algorithm.teacher.revision is x; leave one of them out",
        ),
    ],
)
def test_what_is_wrong_with_a_second_model(words: str, said: str, workdir: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        compose_job([*TAUGHT, *re.split(r" (?=\w+[@.]\w+)", words)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("algorithm.reference_path=x", "algorithm.reference=copy"),
            "uses the initial weights of this job; set only one of",
        ),
        (("algorithm.reference_path=x", "algorithm.loss=simpo"), "algorithm=dpo has no reference model; leave it out"),
        (("algorithm.reference_dtype=float32",), "is used only with algorithm.reference_path; set that"),
    ],
)
def test_what_is_wrong_with_a_reference(words: tuple[str, ...], said: str, workdir: Path) -> None:
    assert said in problem(*COMPARED, *words)


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_recipe_is_said(text: str, workdir: Path) -> None:
    write(workdir / "exp.yaml", text)
    write(workdir / "recipes/own.yaml", text)
    assert problem("+recipe=exp.yaml").startswith(": exp.yaml: the recipe is empty; add options")
    assert "recipes/own.yaml: the recipe is empty" in problem("+recipe=[sft_demo,own]")


def test_an_interpolation_in_a_recipe_s_path_is_answered(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workdir / "${d}/exp.yaml", "steps: 3\n")
    said = problem("+recipe='${d}/exp.yaml'")
    assert said.startswith("recipe: ${d}/exp.yaml: ${…} is not resolved in the path of a recipe; type the path itself")
    monkeypatch.chdir(workdir / "${d}")
    assert "rename that folder" in problem("+recipe=exp.yaml")


def test_an_interpolation_in_a_defaults_list_is_answered(workdir: Path) -> None:
    write(workdir / "exp.yaml", "defaults:\n  - override /device: ${oc.env:DEV}\n")
    said = problem("+recipe=exp.yaml")
    assert "${oc.env:DEV} in a defaults list" in said and "type the name itself" in said and "exp.yaml" in said
