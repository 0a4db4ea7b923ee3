"""A web address of a Ray cluster is answered with the command that submits the job; a real cluster runs that."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.cli.args import parse
from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.launch.config import submit_command
from tests.launch.several import Job
from tests.ray_head import head

AT = "launch.address=http://head:8265"
PAIRS = "".join(f'{{"prompt": "say {n}", "completion": "{n}"}}\n' for n in range(40))


def answer(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What is said to a command line."""
    monkeypatch.setattr("sys.argv", ["run", *words])
    with pytest.raises(SpecError) as refused:
        compose_job([word for word in words if not word.startswith("--")])
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize(
    ("typed", "submitted"),
    [
        ("launch=ray {} 'optimizer.betas=[0.9, 0.99]'", "launch=ray 'optimizer.betas=[0.9, 0.99]' --folder {}sft_demo"),
        ("launch=ray {} name=mine", "launch=ray name=mine --folder {}mine"),
        ("--folder=/shared/run launch=ray {}", "--folder=/shared/run launch=ray"),
    ],
)
def test_the_answer_is_the_command_with_all_that_was_typed(
    typed: str, submitted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = answer(monkeypatch, "+recipe=sft_demo", "device=cpu", *shlex.split(typed.format(AT)))
    command = next(line for line in said.splitlines() if "ray job submit" in line)
    own = "ray job submit --address http://head:8265 --working-dir . -- run +recipe=sft_demo device=cpu"
    expected = f"{own} {submitted.format('~/outputs/')} launch.address=auto"
    assert shlex.split(command) == shlex.split(expected)


WORDS = ["name=a b", "data.path=x&y", "optimizer.betas=[0.9,0.99]", "init_from=$HOME", "data.rename_columns={a: b}"]


def test_every_word_arrives_through_the_shell_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray joins the words as list2cmdline does and has a shell run the line."""
    monkeypatch.setattr("sys.argv", ["run", "run", *WORDS, AT])
    job = SimpleNamespace(name="mine", launch=SimpleNamespace(name="ray", address="http://head:8265"))
    command = next(line for line in submit_command(job).splitlines() if "ray job submit" in line)
    entrypoint = subprocess.list2cmdline(["printf", "%s/", *shlex.split(command)[9:-3]])
    read = subprocess.run(["sh", "-c", entrypoint], capture_output=True, text=True, check=True).stdout
    assert read.split("/")[:-1] == WORDS
    monkeypatch.setattr("sys.argv", ["run", "name=a $b", AT])
    assert "put the values into a recipe: 'name=a $b'" in submit_command(job)


def test_a_verb_and_a_sweep_are_for_a_node_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run", "resume", "latest", AT])
    with pytest.raises(SpecError, match=r"run this command on one of its nodes, with launch\.address=auto"):
        compose_job(["+recipe=sft_demo", "launch=ray", AT, "device=cpu"])
    assert "run this command on one of its nodes" in answer(
        monkeypatch, "--multirun", "+recipe=sft_demo", "launch=ray", AT
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch.address=ray://head:10001"], "launch.address: .* type http://HOST:8265"),
        (["launch.address=10.0.0.1:6379", "device=auto"], "device: .* type device=npu, device=cuda or device=cpu"),
        (["launch.folder=/shared"], "launch.folder: not an option of launch=ray; .* `ray job submit`, with --folder"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(words: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        compose_job(["+recipe=sft_demo", "launch=ray", *words])


def test_a_cluster_without_launch_ray_is_refused_by_its_option() -> None:
    with pytest.raises(SpecError, match=r"launch\.address: not an option of launch=local; an option of launch=ray"):
        compose_job(["+recipe=sft_demo", AT])


def test_a_folder_of_the_home_folder_needs_no_shell() -> None:
    assert parse(["--folder", "~/outputs/mine"]).folder == Path.home() / "outputs" / "mine"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_cluster_runs_the_answer(tmp_path: Path) -> None:
    """A file of the working directory goes along; the weights are those of the same job here."""
    pytest.importorskip("ray")
    job = Job(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(PAIRS)
    words = ["data=file", "data.path=pairs.jsonl", "model=tiny", "steps=2", "optimizer.betas=[0.9, 0.99]"]
    words += ["evaluation.every=0", "parallelism=single", "device=cpu", "tracker=none"]
    job.run(*words)
    with head() as cluster:
        one = Job(tmp_path, "submitted.txt")
        at = (f"launch.address={cluster.address}", "--folder", str(tmp_path / "shared"))
        said = one.run(*words, "launch=ray", *at, code=2)
        command = shlex.split(next(line for line in said.splitlines() if "ray job submit" in line))
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", *command[1:]]
        done = subprocess.run(
            ray,
            cwd=tmp_path,
            env={**cluster.environment, "NO_PROXY": "127.0.0.1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 core in one placement group" in done.stdout and "done      2 steps" in done.stdout
    one.latest = tmp_path / "shared"
    assert one.curve() == job.curve() and one.weights(2) == job.weights(2)
