"""The cases of `run bench`, and what runs them; torch is imported on the way, not before.

On a card, at the shapes of Qwen3 0.6B and 8B; on a processor, at toy size. A case is the words of a job, and a folder
with its model's shape, a tokenizer and a file of rows that are all equally long.

specs ─▶ environment ─▶ torch ─▶ the device itself ─▶ each case: job, baseline ─▶ BenchResult
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, Problem, SpecError
from runner.core.fsync_io import error_reason
from runner.core.package import read_table
from runner.device.process_setup import load_torch, set_environment
from runner.launch.local import prepare_spec
from runner.launch.run_messages import console_logging
from runner.spec.job import JobSpec
from runner.tools.plan.known_models import KNOWN_MODELS, Shape

if TYPE_CHECKING:
    from runner.tools.bench.report import BenchResult


ROWS = 64  # of a file; steps take them in turns
END = 1  # token that a tokenizer of bytes adds to a text
COMMON = (
    *("data=file", "data.cache=false", "model.from_scratch=true", "tracker=none", "schedule=constant"),
    *("evaluation.every=0", "checkpoint.every=0", "checkpoint.export=false", "watch.device_stats_interval_s=0"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A job and its baseline. rows: per step; length: tokens per row, with answers; words: of the job."""

    name: str
    shape: Shape
    kind: Literal["text", "pairs", "prompts"]
    rows: int
    length: int
    answer: int
    words: tuple[str, ...]

    def job(self, folder: Path, steps: int) -> list[str]:
        """The words of the job, whose files are in `folder`."""
        sizes = [f"algorithm.batch_size={self.rows}", f"data.max_length={self.prompt}", f"steps={steps}"]
        return [*self.words, *COMMON, f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}", *sizes]

    @property
    def prompt(self) -> int:
        """Tokens of a row of data."""
        return self.length - self.answer if self.kind == "prompts" else self.length

    def write(self, folder: Path) -> None:
        """Make the files. Imports transformers."""
        from transformers import AutoConfig

        from runner.model.tiny import byte_tokenizer

        tokenizer = byte_tokenizer(self.length)
        tokenizer.save_pretrained(folder / "model")
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        AutoConfig.for_model(**self.shape | ends).save_pretrained(folder / "model")
        letters = random.Random(0)

        def text(tokens: int) -> str:
            return "".join(letters.choices(string.ascii_lowercase, k=tokens))

        make: dict[str, Callable[[], dict[str, str]]] = {
            "text": lambda: {"text": text(self.length - END)},
            "prompts": lambda: {"prompt": text(self.prompt)},
            "pairs": lambda: (
                {"prompt": text(self.length - self.answer)}
                | {side: text(self.answer - END) for side in ("chosen", "rejected")}
            ),
        }
        lines = (json.dumps(make[self.kind]()) for _ in range(ROWS))
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def cases(toy: bool) -> list[Case]:
    """What is measured on a processor (toy), or on a card."""
    table = read_table(__file__, "cases.yaml")
    shapes = {**table["shapes"], **KNOWN_MODELS}
    found = table["toy" if toy else "card"]
    return [Case(**one | {"shape": shapes[one["shape"]], "words": tuple(one["words"])}) for one in found]


FORMAT = 1  # of the JSON; grows when a field changes its meaning or goes
STEPS = {True: 3, False: 6}  # of a case, by whether it is at toy size; the first one does not count


def read_earlier(path: Path) -> dict[str, Any]:
    """The JSON of an earlier bench. Raises DataError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--compare {path}: {error_reason(error)}; expected a file written by run bench") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "cases" not in found:
        raise DataError(f"--compare {path}: expected a file of run bench in format {FORMAT}")
    return found


def run_bench(
    jobs: Sequence[tuple[Case, JobSpec, Path]], say: Callable[[str], None], save: Callable[[BenchResult], None]
) -> BenchResult:
    """Measure the device, and every case with its job's spec and the folder for its files.

    `say` gets each line of the table as soon as it is known, `save` all results so far after each case. Raises
    SpecError for jobs of several processes.
    """
    first = jobs[0][1]
    if first.launch.world > 1:
        text = f"run bench uses one process, but this job has {first.launch.world}"
        raise SpecError([Problem("launch.devices", f"{text}; type launch.devices=1 parallelism=single")])
    first.device.preflight()
    with console_logging(jobs[0][2] / "run.log", silent=True):
        decide = Decisions(first.strict)
        set_environment(first, decide)
        load_torch(first.device.name)
        from runner.build import build_device
        from runner.tools.bench.measure import measure_case, measure_device  # torch is imported here
        from runner.tools.bench.report import BenchResult, format_header, format_row

        device = build_device(first, decide)
        machine = measure_device(first, device, decide)
        say("\n".join(format_header(machine)))
        found = []
        for case, spec, folder in jobs:
            case.write(folder)
            found.append(measure_case(case.name, prepare_spec(spec), folder, device, decide))
            say(format_row(found[-1]))
            result = BenchResult(machine, tuple(found), decide.records())
            save(result)
        for decision in decide.entries:
            if not decision.is_fact:
                say(f"decided  {decision}")
        return result
