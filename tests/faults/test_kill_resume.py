"""`kill -9` of a real run at random moments, each followed by a resume: it ends as a run left in peace, bit for bit.

peaceful:  start ────────────────────────────────────────▶ step 24   ┐
                                                                     ├ same bytes
killed:    start ──✗  resume ────✗  resume ─✗ … resume ──▶ step 24   ┘
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.data.demo_shapes import answer, draw
from runner.tracker.text import MACHINE_METRICS
from tests.command import Command
from tests.data.conftest import chat
from tests.data.test_images import url

SMALL = (
    "checkpoint.every=3",
    "evaluation.every=8",
    "evaluation.max_new_tokens=8",
    "algorithm.batch_size=8",
    "data.items=200",
    "data.held_out=8",
    "tracker=none",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.layers=2",
)
SFT = ("+recipe=sft_demo", "schedule.warmup_steps=2")
# random weights sort nothing, so that answers are rewarded for their length: every group has a gradient
SAMPLED = (
    "init_from=null",
    "sampler.max_new_tokens=8",
    "reward=length",
    "reward.max_length=8",
    "reward.overlong_buffer_len=7",
)
TEACHER = "algorithm.teacher=../teacher/outputs/latest"
JOBS = {
    "full": SFT,
    "full, saved in the background": (*SFT, "checkpoint.asynchronous=true"),
    "lora with dropout": (*SFT, "adapter=lora", "adapter.dropout=0.1"),
    "lora on nf4": (*SFT, "adapter=lora", "model.quantization=nf4"),
    "dpo": ("+recipe=dpo_demo", "init_from=null"),
    "dpo, cached reference": ("+recipe=dpo_demo", "init_from=null", "algorithm.reference=cached"),
    "grpo": ("+recipe=grpo_demo", *SAMPLED),
    "grpo, lag 1": ("+recipe=grpo_demo", *SAMPLED, "algorithm.lag=1"),
    "ppo": ("+recipe=ppo_demo", *SAMPLED),
    "opd, lag 1": ("+recipe=distill_demo", TEACHER, "init_from=null", "algorithm.lag=1"),
    "distill": (*SFT, "algorithm=distill", TEACHER),
    "ppo, shared critic": ("+recipe=ppo_demo", *SAMPLED, "algorithm.critic=shared"),
}
IMAGES = (
    "+recipe=vision_demo",
    "data=file",
    "data.path=../rows.jsonl",
    "data.eval_path=../held_out.jsonl",
    "schedule.warmup_steps=2",
    *(word for word in SMALL if not word.startswith(("data.", "evaluation.max"))),
    "evaluation.max_new_tokens=12",
)
SLOW = ("lora on nf4", "full, saved in the background", "grpo, lag 1", "opd, lag 1")
RESUME = ("resume", "latest")
DEADLINE_S = 180.0  # machines may be busy


class Run:
    """One run in its own folder, as a series of processes."""

    def __init__(self, cwd: Path, steps: int, job: str | tuple[str, ...]) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        words = (*JOBS[job], *SMALL) if isinstance(job, str) else job
        self.cwd, self.steps, self.job = cwd, steps, (*words, f"steps={steps}")
        self.latest = cwd / "outputs" / "latest"
        self.printed = cwd / "printed.txt"

    def start(self, *arguments: str, hold_at: int | None = None, **environment: str) -> Command:
        environment["RUNNER_CACHE"] = str(self.cwd / "cache")
        return Command(*arguments, cwd=self.cwd, printed=self.printed, hold_at=hold_at, **environment)

    def steps_logged(self) -> int:
        """Lines of metrics.jsonl, which are the steps done, but for the evaluation before the first."""
        path = self.latest / "metrics.jsonl"
        return path.read_bytes().count(b'"train/loss"') if path.exists() else 0

    def checkpoint(self) -> dict[str, bytes]:
        """The last checkpoint's files, but for the manifest, which tells the time."""
        folder = self.latest / "checkpoints" / f"step-{self.steps:08d}"
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "MANIFEST.json"}

    def export(self) -> bytes:
        """The exported weights, of the model or of its adapter."""
        [weights] = (self.latest / "export").glob("*.safetensors")
        return weights.read_bytes()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A JSONL file's records without what no two runs share."""
        text = (self.latest / name).read_text().replace(str(self.cwd), "CWD")  # paths of images are in its cache
        records = [json.loads(line) for line in text.splitlines()]
        return [{k: v for k, v in record.items() if not k.startswith(MACHINE_METRICS)} for record in records]


def wait_until(happened: Callable[[], bool], process: Command) -> None:
    """Return when `happened`, or when the process has ended by itself."""
    end = time.monotonic() + DEADLINE_S
    while not happened() and process.poll() is None:
        assert time.monotonic() < end, "nothing happened before the deadline"
        time.sleep(0.002)


def kill_somewhere(run: Run, process: Command, jump: int, moments: random.Random) -> bool:
    """Kill the process while it starts up, or up to `jump` steps further on; False if it ended before."""
    wait_until(lambda: (run.latest / "spec.yaml").exists(), process)  # before that there is nothing to resume
    if moments.random() < 0.25:
        # On a quiet machine 3 s are enough for most of the run, and few steps would be left to kill it in.
        begin, end = run.steps_logged(), time.monotonic() + moments.uniform(0.0, 3.0)
        wait_until(lambda: time.monotonic() >= end or run.steps_logged() >= begin + jump, process)
    else:
        target = min(run.steps_logged() + moments.randint(1, jump), run.steps)
        wait_until(lambda: run.steps_logged() >= target, process)
        time.sleep(moments.uniform(0.0, 0.05))
    process.kill()
    return process.wait() == -signal.SIGKILL


def killed_run(run: Run, kills: int, seed: int) -> list[int]:
    """Start a run, kill it `kills` times and then let it end; the steps it had logged at each kill."""
    moments, deaths = random.Random(seed), list[int]()
    for words in (run.job, *[RESUME] * (kills - 1)):
        process = run.start(*words, hold_at=run.steps)
        assert kill_somewhere(run, process, 3 * run.steps // (2 * kills), moments), run.printed.read_text()
        deaths.append(run.steps_logged())
    process = run.start(*RESUME)
    assert process.wait(timeout=DEADLINE_S) == 0, run.printed.read_text()
    return deaths


def with_teacher(folder: Path, job: str) -> None:
    """Make the run that the job's teacher comes from, if it has one."""
    if TEACHER in JOBS[job]:
        run = Run(folder / "teacher", 4, "full")
        assert run.start(*run.job).wait(timeout=DEADLINE_S) == 0, run.printed.read_text()


def assert_same(run: Run, peaceful: Run) -> None:
    assert run.rows("metrics.jsonl") == peaceful.rows("metrics.jsonl")
    assert run.rows("samples.jsonl") == peaceful.rows("samples.jsonl")
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(run.steps + 1))
    assert run.checkpoint().keys() == peaceful.checkpoint().keys()
    for name, content in peaceful.checkpoint().items():
        assert run.checkpoint()[name] == content, f"{name} differs"
    assert run.export() == peaceful.export()


@pytest.mark.parametrize("job", ["full", *(pytest.param(job, marks=pytest.mark.slow) for job in SLOW)])
def test_killed_and_resumed_is_the_same_run(tmp_path: Path, job: str) -> None:
    with_teacher(tmp_path, job)
    peaceful, killed = Run(tmp_path / "peaceful", 24, job), Run(tmp_path / "killed", 24, job)
    assert peaceful.start(*peaceful.job).wait(timeout=DEADLINE_S) == 0, peaceful.printed.read_text()
    killed_run(killed, kills=4, seed=0)
    assert_same(killed, peaceful)


def write_rows_with_images(path: Path, numbers: range) -> None:
    rows = [{"messages": chat("<image>which shapes?", answer(n)), "images": [url(draw(n))]} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_images_killed_in_data_in_a_step_and_in_a_save_give_the_same_run(tmp_path: Path) -> None:
    write_rows_with_images(tmp_path / "rows.jsonl", range(64))
    write_rows_with_images(tmp_path / "held_out.jsonl", range(64, 72))
    peaceful, killed = Run(tmp_path / "peaceful", 8, IMAGES), Run(tmp_path / "killed", 8, IMAGES)
    assert peaceful.start(*peaceful.job).wait(timeout=DEADLINE_S) == 0, peaceful.printed.read_text()
    cache = killed.cwd / "cache" / "images"
    moments: dict[str, Callable[[], bool]] = {
        "data": lambda: cache.is_dir() and any(cache.iterdir()),
        "step": lambda: killed.steps_logged() >= 4 and (killed.latest / f"checkpoints/step-{3:08d}").is_dir(),
    }
    words = killed.job
    for name, happened in moments.items():
        process = killed.start(*words, hold_at=5)
        wait_until(happened, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"it ended before a kill in {name}: {killed.printed.read_text()}"
        words = RESUME
    process = killed.start(*RESUME, RUNNER_FAILPOINT="checkpoint.mid_write:kill")
    assert process.wait(timeout=DEADLINE_S) == -signal.SIGKILL, killed.printed.read_text()
    assert any(killed.latest.glob(f"checkpoints/.staging-{6:08d}-*"))
    assert killed.start(*RESUME).wait(timeout=DEADLINE_S) == 0, killed.printed.read_text()
    assert_same(killed, peaceful)
    # the numbers of the last evaluation are those of run eval, which reads the images again
    assert killed.start("eval", "latest").wait(timeout=DEADLINE_S) == 0, killed.printed.read_text()
    [record] = killed.rows("evaluations.jsonl")
    last = killed.rows("metrics.jsonl")[-1]
    assert record["values"]["held_out/exact_match"] == last["eval/exact_match"]
    assert record["values"]["held_out/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)


PLAY = """
import random, time
from pathlib import Path

METRICS = Path(__file__).with_name("run") / "outputs" / "latest" / "metrics.jsonl"
RELEASED = Path(__file__).with_name("released")

def respond(messages):
    time.sleep(random.random() / 10)
    while METRICS.exists() and METRICS.read_text().count('"train/loss"') >= 5 and not RELEASED.exists():
        time.sleep(0.01)  # so that the run does not end before it is killed
    turns = sum(message["role"] == "assistant" for message in messages)
    return None if turns == 3 else f"turn {turns}"
"""


LAYOUTS = {
    "one_rank": (),
    "two_ranks": ("parallelism=ddp", "launch.devices=2"),
    "lag_1": ("algorithm.lag=1",),
    "two_samplers": ("launch.samplers=2",),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_that_are_repeated_play_the_same_episodes(tmp_path: Path, layout: str) -> None:
    """Although it depends on the moment which episodes were sampled together."""
    (tmp_path / "play.py").write_text(PLAY)
    played = ("environment=function", "environment.path=../play.py:respond", "environment.timeout_s=200")
    episodes = (*played, *LAYOUTS[layout])
    ends = f"sampler.stop_token_ids={[*range(0, 256, 2)]}"  # half of what random weights write
    run = Run(tmp_path / "run", 8, ("+recipe=grpo_demo", *SAMPLED, *SMALL, *episodes, ends.replace(" ", "")))
    process = run.start(*run.job)
    wait_until(lambda: run.steps_logged() >= 5, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL, run.printed.read_text()
    before = steps(run)
    (tmp_path / "released").touch()
    resumed = run.start(*RESUME)
    assert resumed.wait(timeout=DEADLINE_S) == 0, run.printed.read_text()
    assert "rollouts of earlier attempts" in run.printed.read_text()
    after = steps(run)
    assert len(before) >= 5 and after[: len(before)] == before
    assert len(after) == 8 and all(1.5 < row["environment/turns"] < 3 for row in after)


def steps(run: Run) -> list[dict[str, Any]]:
    """What each step says of its episodes and its update, without the speed of the servers."""
    own = ("step", "train/", "rollout/", "reward/", "environment/")
    rows = [{k: v for k, v in row.items() if k.startswith(own)} for row in run.rows("metrics.jsonl")]
    return [row for row in rows if row["step"] > 0]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", JOBS)
def test_twenty_kills(tmp_path: Path, job: str) -> None:
    with_teacher(tmp_path, job)
    peaceful, killed = Run(tmp_path / "peaceful", 96, job), Run(tmp_path / "killed", 96, job)
    assert peaceful.start(*peaceful.job).wait(timeout=DEADLINE_S) == 0, peaceful.printed.read_text()
    deaths = killed_run(killed, kills=20, seed=1)
    assert len(set(deaths)) >= 8, f"the kills came at too few different moments: {deaths}"
    assert_same(killed, peaceful)
