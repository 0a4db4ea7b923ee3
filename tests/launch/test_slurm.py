"""launch=slurm: what Slurm's variables mean, and whole jobs on a stand-in that starts real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from runner.cli.job_builder import compose_job
from runner.core.errors import EnvironmentProblem, SpecError
from runner.launch.exit_cause import JobFailed
from runner.launch.slurm import srun_task, submission
from runner.launch.slurm import srun_task as slurm_job
from runner.launch.slurm.commands import allocated_cards, count_stage, steps_of
from runner.launch.slurm.srun_task import SlurmTask
from runner.run_dir.folder import RunFolder
from tests.launch import slurm_stand_in
from tests.launch.several import DEADLINE_S, Job, wait_until
from tests.launch.slurm_stand_in import first_job

STEP = {
    "SLURM_JOB_ID": "40",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "here[0-1]",
}
DEFAULTS = {name: srun_task.DEFAULT for name in ("launch.name", "launch.devices", "launch.nodes")}
OWN = {"name": "slurm", "devices": 1, "samplers": 0, "nodes": 1, "node_rank": None, "rdzv_endpoint": None}
WORDS = ("+recipe=sft_demo", "launch=slurm", "parallelism=ddp", "evaluation.every=0")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    commands, state = slurm_stand_in.install(tmp_path / "bin"), tmp_path / "slurm"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(state))
    yield state
    slurm_stand_in.end_all(state)
    assert [path.read_text() for path in state.glob("*.errors") if path.stat().st_size] == []


@pytest.fixture
def step(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def test_the_layout_is_what_slurm_says(step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"launch.rdzv_endpoint=127.0.0.1:{srun_task.FIRST_PORT + 40}"
    assert srun_task.slurm_layout(OWN, DEFAULTS, "cpu") == ["launch.nodes=2", "launch.node_rank=1", address]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert srun_task.slurm_layout(OWN, DEFAULTS, "cuda")[-1] == "launch.devices=8"
    assert srun_task.slurm_layout({**OWN, "samplers": 2}, DEFAULTS, "cuda")[-1] == "launch.devices=6"
    typed = {**DEFAULTS, "launch.devices": "command line"}
    assert "launch.devices" not in " ".join(srun_task.slurm_layout({**OWN, "devices": 4}, typed, "cuda"))
    with pytest.raises(EnvironmentProblem, match=r"launch\.devices needs 9 cards, but Slurm gave this job 8"):
        srun_task.slurm_layout({**OWN, "devices": 9}, typed, "cuda")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("node_rank", 0, "launch.node_rank=0: Slurm sets it"),
        ("nodes", 3, "launch.nodes=3: this Slurm job has 2"),
        ("partition", "big", "launch.partition: is for submitting a job, but this is Slurm job 40"),
    ],
)
def test_what_contradicts_slurm_is_refused(step: None, name: str, value: object, said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        srun_task.slurm_layout({**OWN, name: value}, {**DEFAULTS, f"launch.{name}": "command line"}, "cpu")


def test_what_repeats_slurm_is_not_set_twice(step: None) -> None:
    typed = {**DEFAULTS, "launch.nodes": "command line"}
    assert not any(
        word.startswith("launch.nodes=") for word in srun_task.slurm_layout({**OWN, "nodes": 2}, typed, "cpu")
    )


@pytest.mark.parametrize(("device", "cores", "said"), [("npu", 1, "8 processes on cards have 1 core"), ("npu", 8, "")])
def test_too_few_cores_are_said(
    device: str, cores: int, said: str, step: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a cluster gives to a job that names cards alone is one core for all of its processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    words = ["+recipe=sft_demo", "launch=slurm", f"device={device}", "launch.devices=8", "parallelism=ddp"]
    srun_task.exec_srun(compose_job(words).spec)
    assert capsys.readouterr().out.count(said or "cores") == bool(said)


def test_who_is_a_task() -> None:
    assert SlurmTask.from_environment({}) is None and SlurmTask.from_environment({"SLURM_JOB_ID": "40"}) is None
    assert SlurmTask.from_environment({**STEP, "SLURM_STEP_ID": "4294967290"}) is None, "salloc's shell"
    assert SlurmTask.from_environment(STEP) == SlurmTask(40, 2, 1, "here[0-1]")
    with pytest.raises(EnvironmentProblem, match=r"4 tasks on 2 machines.*--ntasks-per-node=1"):
        SlurmTask.from_environment({**STEP, "SLURM_STEP_NUM_TASKS": "4"})


class Script:
    """The script of Slurm job 40: each start of the job runs its commands in order, until one is interrupted."""

    def __init__(self, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(cwd)
        self.cwd, self.patch, self.made = cwd, monkeypatch, 0

    def start(self, restarts: int, *commands: str, step: int | None = None) -> list[str]:
        """The folders in which the commands continue or, with a +, that they make; step: of all of them."""
        found = []
        for number, words in enumerate(commands):
            self.patch.setattr("sys.argv", ["run", *words.split()])
            own = {"SLURM_STEP_ID": str(number if step is None else step), "SLURM_RESTART_COUNT": str(restarts)}
            variables = {**STEP, **own, "SLURM_NODEID": "0"}
            for name, value in variables.items():
                self.patch.setenv(name, value)
            before = srun_task.requeued_folder(None)
            folder = RunFolder(before or self._make())
            srun_task.record_run_folder(folder)
            found.append(folder.root.name if before else f"+{folder.root.name}")
            self.patch.setenv("SLURM_NODEID", "1")
            assert srun_task.requeued_folder(None) == before, "as machine 0, also after that recorded the folder"
            srun_task.record_run_folder(folder)
        return found

    def _make(self) -> Path:
        self.made += 1
        folder = RunFolder(self.cwd / f"run-{self.made}")
        folder.root.mkdir()
        folder.spec.touch()
        return folder.root


def test_each_command_of_a_requeued_script_continues_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, monkeypatch)
    sft, dpo = "+recipe=sft launch=slurm", "+recipe=dpo init_from=latest launch=slurm"
    assert script.start(0, sft) == ["+run-1"]
    assert script.start(1, sft, dpo) == ["run-1", "+run-2"], "the second one had not begun"
    assert script.start(2, sft, dpo, sft, sft) == ["run-1", "run-2", "+run-3", "+run-4"]
    assert script.start(3, sft, dpo, sft) == ["run-1", "run-2", "run-3"], "the same words, in order"
    assert script.start(4, sft, dpo, sft, sft, sft) == ["run-1", "run-2", "run-3", "run-4", "+run-5"]
    assert script.start(0, sft, dpo) == ["+run-6", "+run-7"], "another job of this number"
    assert script.start(1, sft, dpo) == ["run-6", "run-7"]
    assert script.start(0, sft, dpo, step=3) == ["+run-8", "+run-9"], "another job, all commands in one step"
    assert script.start(1, sft, dpo, step=3) == ["run-8", "run-9"]
    monkeypatch.delenv("SLURM_STEP_ID")
    assert srun_task.requeued_folder(None) is None, "the script itself becomes srun"


def test_a_machine_that_is_left_alone_ends() -> None:
    assert "--wait=120" in srun_task.srun_command(["run"], 2)


def test_the_cards_of_one_of_several_nodes(cluster: Path) -> None:
    said = """JobId=40 JobName=x
     Nodes=a1 CPU_IDs=0-7 Mem=0 GRES=npu:910b:2(IDX:0-1)
     Nodes=a7 CPU_IDs=0-7 Mem=0 GRES=npu:910b:3(IDX:2,4-5)"""
    path = Path(os.environ["PATH"].split(":")[0]) / "scontrol"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    assert (allocated_cards("40", "npu:910b", "a7"), allocated_cards("40", "npu", "a1")) == ([2, 4, 5], [0, 1])
    assert allocated_cards("40", "npu", "a2") == []


def test_what_is_asked_of_slurm() -> None:
    words = ("launch.nodes=2", "launch.devices=4", "launch.partition=big", "launch.sbatch={mem: 64G, exclusive: true}")
    spec = compose_job([*WORDS, *words]).spec
    text = submission.batch_script(spec, Path("/run folder/slurm"), "true")
    lines = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert lines >= {"nodes=2", "ntasks=2", "ntasks-per-node=1", "partition=big", "cpus-per-task=4", "mem=64G"}
    assert lines >= {"exclusive", "requeue", "signal=B:USR2@120", "output='/run folder/slurm/%j.log'"}
    assert not any(line.startswith("gres") for line in lines)
    cards = compose_job([*WORDS, *words, "device=npu", "launch.gres=npu:910b"]).spec
    text = submission.batch_script(cards, Path("x"), "true")
    assert "#SBATCH --gres=npu:910b:4\n" in text and "cpus-per-task" not in text
    with pytest.raises(SpecError, match="auto is resolved only"):
        submission.batch_script(compose_job([*WORDS, *words[:2], "device=auto"]).spec, Path("x"), "true")


@pytest.mark.parametrize(("more", "cores"), [("launch.cpus=30", 30), ("device.threads=3", 6)])
def test_cores_are_asked_of_slurm_where_there_are_no_cards(more: str, cores: int) -> None:
    text = submission.batch_script(compose_job([*WORDS, "launch.devices=2", more]).spec, Path("x"), "true")
    assert f"#SBATCH --cpus-per-task={cores}\n" in text


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose Slurm job has ended well, of which Slurm is asked without a pause."""
    monkeypatch.setattr(submission, "POLL_S", 0.0)
    folder = RunFolder(tmp_path)
    folder.status.write_text(json.dumps({"state": "done", "exit_code": 0, "error": None}))
    return folder


def test_a_slurm_that_does_not_answer_for_a_while_is_asked_again(
    followed: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([None, ("RUNNING", "None"), None, None, ("COMPLETED", "None")])

    def state_of(job: str) -> tuple[str, str]:
        if (answer := next(answers)) is None:
            raise EnvironmentProblem("squeue: Unable to contact slurm controller")
        return answer

    monkeypatch.setattr(submission, "state_of", state_of)
    assert submission.follow(followed, "17", followed.slurm / "17.log", b"") == 0
    said = "slurm    squeue: Unable to contact slurm controller; retrying\n"
    assert capsys.readouterr().out == said * 2, "once each time"


def test_a_slurm_that_never_answers_is_given_up_and_the_job_left_alone(
    followed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state_of(job: str) -> tuple[str, str]:
        raise EnvironmentProblem("squeue: Unable to contact slurm controller")

    monkeypatch.setattr(submission, "state_of", state_of)
    monkeypatch.setattr(submission, "SILENT_S", 0.05)
    said = r"slurm controller, for 0.05 s; stopped following job 17, which continues; to end it: scancel 17"
    with pytest.raises(EnvironmentProblem, match=said):
        submission.follow(followed, "17", followed.slurm / "17.log", b"")


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
@pytest.mark.parametrize("last", [("done", 0, None), ("failed", 3, "line 7")])
def test_a_resumed_run_whose_job_never_starts_it_has_not_ended_as_before(
    last: tuple[str, int, str | None], state: str, followed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.status.write_text(json.dumps(dict(zip(("state", "exit_code", "error"), last, strict=True))))
    monkeypatch.setattr(submission, "run_slurm", lambda *command: "Submitted batch job 17")
    monkeypatch.setattr(submission, "state_of", lambda job: (state, "None"))
    spec = compose_job([*WORDS, "launch.nodes=2", "launch.follow=true"]).spec
    with pytest.raises(JobFailed, match=rf"Slurm job 17 ended \({state}\): the run did not start") as ended:
        submission.submit(spec, followed, ["steps=400"])
    assert ended.value.exit_code == 75


def test_a_resumed_run_ends_as_its_new_attempt(followed: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = followed.status.read_bytes()
    followed.status.write_text(json.dumps({"state": "failed", "exit_code": 3, "error": "line 9"}))
    monkeypatch.setattr(submission, "state_of", lambda job: ("FAILED", "None"))
    with pytest.raises(JobFailed, match=r"\(FAILED\): line 9") as ended:
        submission.follow(followed, "17", followed.slurm / "17.log", before)
    assert ended.value.exit_code == 3


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.sbatch={nodes: 3}", "nodes is set by launch.nodes"),
        ("launch.gres=gpu:a100", "device=cpu has no cards"),
        ("launch.attempts=2", "needs launch=ray"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_submitted(word: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        compose_job([*WORDS, "launch.nodes=2", word])


def test_a_refusal_is_slurms_and_leaves_nothing(cluster: Path, tmp_path: Path) -> None:
    job = Job(tmp_path)
    said = job.run(*WORDS, "launch.nodes=2", "launch.partition=none", code=2)
    assert "Slurm rejects a job with 2 machines, each 1 process, partition none: sbatch: " in said
    assert "Invalid partition name specified" in said and not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_job_on_two_machines_is_that_of_two_processes(cluster: Path, tmp_path: Path) -> None:
    job, alike = Job(tmp_path), Job(tmp_path / "alike")
    alike.cwd.mkdir()
    said, number = job.run(*WORDS, "launch.nodes=2", "steps=3", "launch.follow=true"), first_job(cluster)
    assert f"job {number} submitted: 2 machines, each 1 process" in said
    assert "rank 0" in said and "done      3 steps" in said, "followed"
    folder = RunFolder(job.latest.resolve())
    assert (folder.slurm / f"{number}.log").read_text() in said
    typed = yaml.safe_load(folder.overrides.read_text())["typed"]
    assert "launch.nodes=2" in typed and job.status()["attempt"] == 1
    alike.run(*WORDS[:1], *WORDS[2:], "launch.devices=2", "steps=3")
    assert job.weights(3) == alike.weights(3) and job.curve() == alike.curve()
    assert "finished after 3 steps" in job.run("resume", "latest")


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_near_the_limit_it_saves_and_goes_on_where_it_was(cluster: Path, tmp_path: Path) -> None:
    job, alike = Job(tmp_path), Job(tmp_path / "alike")
    alike.cwd.mkdir()
    more = ("steps=16", "checkpoint.every=1000")
    process = job.start(*WORDS, "launch.nodes=2", "launch.follow=true", *more)
    wait_until(lambda: job.steps() > 2, process)
    os.kill(slurm_stand_in_job(cluster)["pid"], signal.SIGUSR2)
    assert process.wait(DEADLINE_S) == 0, job.said()
    said = job.said()
    assert "requeued: Slurm restarts the job" in said and "resume   after step" in said
    assert (slurm_stand_in_job(cluster)["starts"], job.status()["attempt"]) == (2, 2)
    alike.run(*WORDS[:1], *WORDS[2:], "launch.devices=2", *more)
    assert job.weights(16) == alike.weights(16) and job.curve() == alike.curve()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_near_the_limit_a_recipe_that_is_run_first_saves_and_goes_on(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    first = "# @package _global_\ndefaults:\n  - override /algorithm: sft\nsteps: 16\ncheckpoint:\n  every: 1000\n"
    first += "evaluation:\n  every: 0\n"
    (tmp_path / "recipes" / "quick.yaml").write_text(first)
    job = Job(tmp_path)
    words = ("+recipe=sft_demo", "launch=slurm", "evaluation.every=0", "init_from=recipe:quick", "steps=2")
    process = job.start(*words, "launch.follow=true")

    def steps() -> int:
        return sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("outputs/stages/quick/*/metrics.jsonl"))

    wait_until(lambda: steps() > 2, process)
    os.kill(slurm_stand_in_job(cluster)["pid"], signal.SIGUSR2)
    assert process.wait(DEADLINE_S) == 0, job.said()
    said = job.said()
    assert "requeued: Slurm restarts the job" in said and "init_from: continuing +recipe=quick" in said
    assert (slurm_stand_in_job(cluster)["starts"], job.status()["attempt"], steps(), job.steps()) == (2, 1, 16, 2)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_script_of_ones_own_is_requeued_into_the_same_folder(cluster: Path, tmp_path: Path) -> None:
    job = Job(tmp_path)
    own = {"SLURM_JOB_ID": "40", "SLURM_JOB_NUM_NODES": "2"}
    more = (*WORDS, "steps=16", "checkpoint.every=1000")
    process = job.start(*more, **own)  # as in a script: no task of srun, so it becomes srun itself
    wait_until(lambda: job.steps() > 2, process)
    first, before = job.latest.resolve(), job.steps()
    process.send_signal(signal.SIGTERM)  # preempted
    assert process.wait(DEADLINE_S) == 75, job.said()
    assert job.status()["state"] == "interrupted" and job.status()["exit_code"] == 75
    said = job.run(*more, **own, SLURM_RESTART_COUNT="1")
    assert "was started by this Slurm job: continuing it" in said and job.latest.resolve() == first
    assert job.steps() == 16 > before and job.status()["attempt"] == 2
    recorded = (tmp_path / "outputs" / ".slurm" / "40.runs").read_text().splitlines()
    assert [line.endswith(f'"{first}"]') for line in recorded] == [True, True], "one line for each start"


@pytest.mark.slow
def test_a_run_that_slurm_has_is_not_submitted_again(cluster: Path, tmp_path: Path) -> None:
    job, number = Job(tmp_path), first_job(cluster)
    assert f"job {number} submitted" in job.run(*WORDS, "launch.nodes=2", "steps=2000")
    said = job.run("resume", "latest", code=2)
    assert f"this run is already in Slurm: job {number}" in said and f"scancel {number}" in said
    slurm_stand_in.end_all(cluster)
    asked = ("launch.time=120", "launch.nodes=2", "launch.follow=true")
    process = job.start("resume", "latest", "steps=2001", *asked)
    wait_until(lambda: job.steps() > 2, process)
    slurm_stand_in.end_all(cluster)
    process.wait(DEADLINE_S)
    assert f"job {number + 1} submitted: 2 machines" in job.said()
    assert yaml.safe_load(RunFolder(job.latest).spec.read_text())["launch"]["time"] == 120


def slurm_stand_in_job(state: Path) -> dict[str, int]:
    return dict(json.loads((state / f"{first_job(state)}.json").read_text()))


def test_a_job_that_came_no_further_is_not_requeued(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "40")
    run = RunFolder(tmp_path)
    assert slurm_job.requeue(run, 0) == 75
    run.metrics.write_text("")  # opened, and no step made
    assert slurm_job.requeue(run, 0) == 75
    run.metrics.write_text('{"step": 7, "x": 1}\n{"step": 8, "x": 1}\n{"st')
    assert slurm_job.requeue(run, 8) == 75 and not (cluster / "40.told").exists()
    assert slurm_job.requeue(run, 7) == 0 and (cluster / "40.told").read_text() == "requeue"


def test_steps_of_recipes_that_are_run_first_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, first = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "first")
    for folder, step in ((run, 7), (first, 30)):
        folder.root.mkdir()
        folder.metrics.write_text(f'{{"step": {step}}}\n')
    count_stage(first)
    assert not (tmp_path / "outputs").exists(), "no Slurm job"
    monkeypatch.setenv("SLURM_JOB_ID", "40")
    assert steps_of(run) == 7
    count_stage(first)
    count_stage(first)  # in the next turn
    assert steps_of(run) == 37
