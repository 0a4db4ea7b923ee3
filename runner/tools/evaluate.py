"""`run eval`: measure several models on named sets and compare them question by question.

sources × sets ──▶ Engine ⇄ AnswerJournal ──▶ AnswerEvaluator ──▶ SetResult ──▶ table, results.json, report.html
                                                                     └──▶ evaluations.jsonl of each source that is a run
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.core.rank_info import RankInfo
from runner.inference.model_source import LoadedModel, ModelSource, load_source, source_spec
from runner.interfaces import TokenizedExample
from runner.run_dir.folder import OUTPUTS, RunFolder, display_path, make_unique, write_atomic
from runner.run_dir.manifest import LIBRARIES
from runner.spec.base import ComponentConfig
from runner.spec.evaluation import HELD_OUT, EvaluationSet, EvaluationSetConfig, measures_only_loss, without_bounds
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tools.report.page import Page, TableRow
from runner.tools.report.samples_grid import answers_table
from runner.tracker.console import interval_text
from runner.tracker.text import align_columns, labeled_line, print_text

PROGRESS_S = 10.0  # seconds between lines that count answers
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class SetResult:
    """A model's numbers on a set.

    scores: reward or exact match of each question, by the question's key; None = not scored; samples: the first answer
    to each question first, in the order of scores
    """

    values: Values
    scores: dict[str, float | None]
    samples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model that was evaluated. weights: digest of its weights; sets: results by the sets' names."""

    source: ModelSource
    step: int | None
    weights: str
    sets: Mapping[str, SetResult]


@dataclass(slots=True)
class AnswerProgress:
    """Counts new completions on the screen."""

    about: str
    count: int = 0
    printed_s: float = field(default_factory=time.monotonic)

    def add(self) -> None:
        """One more answer."""
        self.count += 1
        if time.monotonic() - self.printed_s >= PROGRESS_S:
            self.printed_s = time.monotonic()
            print_text(f"{self.about}: {self.count} new completions", file=sys.stderr)


def sets_of_run(spec: JobSpec) -> list[EvaluationSet]:
    """What a run evaluates: its held-out rows with its reward and environment, and its named sets.

    Raises SpecError where it evaluates nothing.
    """
    names = {name: getattr(spec.evaluation, name) for name in ("samples", "temperature", "max_new_tokens")}
    options = EvaluationSetConfig(**names, pass_threshold=spec.evaluation.pass_threshold)
    parts = {"data": spec.data, "reward": spec.reward, "environment": spec.environment}
    own, why = [EvaluationSet(HELD_OUT, options, parts)], ""
    if not spec.data.holds_out:
        own, why = [], "the run has no held-out rows"
    elif measures_only_loss(spec):
        own, why = [], f"held-out rows of algorithm={spec.algorithm.name} have no expected answer, only a loss"
        if spec.evaluation.sets:
            print_text(f"{HELD_OUT}: left out: {why}, which training measured", file=sys.stderr)
    if found := [*own, *spec.evaluation.decoded_sets()]:
        return found
    way = "type '+evaluation=[gsm8k]', or '+evaluation.sets.NAME={data: {name: file, path: FILE}}'"
    raise SpecError([Problem("evaluation.sets", f"{why}; {way}")])


def evaluate_sources(
    sources: Sequence[ModelSource], sets: Sequence[EvaluationSet], base: JobSpec, settings: Mapping[str, Any]
) -> list[Evaluated]:
    """Measure every source on every set. base: what the sets leave open; settings: see `load_source`."""
    found = []
    for source in sources:
        loaded = load_source(source, **settings)
        found.append(_evaluate_model(source, loaded, sets, base, settings))
        del loaded
        gc.collect()  # the weights go before those of the next model come
    return found


def _evaluate_model(
    source: ModelSource, loaded: LoadedModel, sets: Sequence[EvaluationSet], base: JobSpec, settings: Mapping[str, Any]
) -> Evaluated:
    from runner.inference.answer_journal import AnswerJournal
    from runner.inference.torch_engine import TorchEngine
    from runner.weight_sync.weight_checksum import weights_digest

    own = source_spec(source, **settings)
    spec = base.model_copy(update={"chat": loaded.chat, "device": own.device})
    digest = weights_digest(_tensors(loaded.model.module))[:16]
    journal = AnswerJournal(OUTPUTS / "eval" / "answers" / f"{_model_digest(loaded, own, digest)}.jsonl")
    if stops := loaded.stop_text():
        print_text(f"{source.text}: {stops}", file=sys.stderr)
    engine = TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=base.evaluation.batch_size)
    try:
        results = {one.name: _evaluate_set(source, loaded, one, spec, engine, journal) for one in sets}
    finally:
        engine.close()
    return Evaluated(source, loaded.step, digest, results)


def _model_digest(loaded: LoadedModel, spec: JobSpec, weights: str) -> str:
    """Of what answers depend on beside prompt and sampling, e.g. weights and config."""
    from runner.build.precompute_reference import NUMERICS_OPTIONS
    from runner.data.tokenization import digest

    config = json.loads(loaded.model.inner.config.to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if key not in ("_name_or_path", "architectures")}
    where = [loaded.model.device.type, spec.device.numerics_options, *map(version, LIBRARIES)]
    how = [str(loaded.model.compute_dtype), spec.model.model_dump(mode="json", include=NUMERICS_OPTIONS)]
    return digest(weights, config, loaded.tokenizer.get_vocab(), where, how)[:16]


def _tensors(module: Any) -> dict[str, Any]:
    """What answers depend on: weights, buffers that no file has (RoPE), and scales (as of LoRA)."""
    import torch

    scales = {f"{name}.scaling": one.scaling for name, one in module.named_modules() if hasattr(one, "scaling")}
    numbers = {key: [*one.values()] if isinstance(one, Mapping) else [one] for key, one in scales.items()}
    tensors = {key: torch.tensor(values, dtype=torch.float32) for key, values in numbers.items()}
    return {**tensors, **dict(module.named_buffers()), **module.state_dict()}


def _evaluate_set(
    source: ModelSource, loaded: LoadedModel, one: EvaluationSet, spec: JobSpec, engine: Any, journal: Any
) -> SetResult:
    from runner.build.components import build_device
    from runner.build.environments import EnvironmentBuilder
    from runner.build.evaluation import AnswerParts, build_set
    from runner.build.rewards import EvaluationRewards, RewardBuilder
    from runner.inference.answer_journal import JournaledSampler
    from runner.trainer.answer_evaluator import ShorteningSampler

    decide, progress = Decisions(spec.strict), AnswerProgress(f"{source.text} {one.name}")
    device = build_device(spec, decide)
    world = default_registry().factory(spec.parallelism)(spec.parallelism, device=device, place=RankInfo())
    builder = RewardBuilder(loaded.tokenizer, world, decide, RunFolder(journal.path.parent))
    rewards = EvaluationRewards(spec, builder, None)

    def make_sampler(options: Any) -> ShorteningSampler:
        temperature = options.temperature if options.samples else 0.0
        most, stops = options.max_new_tokens, (loaded.stop, loaded.stop_token_ids)
        sampler = JournaledSampler(engine, loaded.tokenizer, journal, temperature, most, progress.add, *stops)
        return ShorteningSampler(sampler)

    def score(items: Sequence[TokenizedExample]) -> list[list[float]]:
        return [_item_logprobs(item, engine) for item in items]

    environments = EnvironmentBuilder(loaded.tokenizer, decide, journal.path.parent)
    parts = (rewards.build, environments, None, None, score, make_sampler)
    answers = AnswerParts(spec, loaded.model, world, decide, *parts)
    known = journal.num_known
    try:
        evaluator = build_set(one, answers)
        report = evaluator.evaluate(loaded.step or 0)
    finally:
        rewards.close()
        environments.close()
        world.close()
    known = journal.num_known - known
    if one.options.choices is None:
        print_text(f"{progress.about}: {progress.count} new completions, {known} cached", file=sys.stderr)
    prefix = f"eval/{one.name}/"
    values = {name.removeprefix(prefix): value for name, value in report.values.items() if name.startswith(prefix)}
    scores = question_scores(report.samples, len(evaluator.questions))
    keys = unique_keys([question.key for question in evaluator.questions])
    return SetResult(values, dict(zip(keys, scores, strict=True)), report.samples)


def _item_logprobs(item: TokenizedExample, engine: Any) -> list[float]:
    """See `ScoreItems`; each branch is scored after the prefix that the branches share."""
    first, *_ = edges = [*(item.branches or (0,)), len(item.ids)]
    rows = [item.ids[:first] + item.ids[a:b] for a, b in pairwise(edges)]
    scores = [[token.logprob for token in engine.score(row, 0)] for row in rows]
    return sum((row[first - 1 :] for row in scores[1:]), scores[0])


def unique_keys(keys: Sequence[str]) -> list[str]:
    """The keys, with a number behind one that was there before: a row may be in the data twice."""
    counts, found = Counter[str](), list[str]()
    for key in keys:
        counts[key] += 1
        found.append(key if counts[key] == 1 else f"{key}#{counts[key]}")
    return found


def question_scores(samples: Sequence[Mapping[str, Any]], questions: int) -> list[float | None]:
    """The mean score of each question's answers: rewards, or exact matches where nothing rewards.

    samples: the first answer to every question first; None where no answer has a score
    """
    key = "reward" if any("reward" in sample for sample in samples) else "exact"
    found = ([s[key] for s in samples[at::questions] if s.get(key) is not None] for at in range(questions))
    return [fmean(scores) if scores else None for scores in found]


def paired_difference(first: Mapping[str, float | None], other: Mapping[str, float | None]) -> Values:
    """other − first, the mean over questions that both have a score of, by key, with its 95 % interval."""
    from runner.trainer.evaluation_metrics import with_interval

    pairs = [(first[key], other[key]) for key in first.keys() & other.keys()]
    differences = sorted(b - a for a, b in pairs if a is not None and b is not None)  # a set has no order
    return with_interval("difference", differences, share=False) | {"questions": float(len(differences))}


# --- what is shown ---


def names_of(found: Sequence[Evaluated]) -> list[str]:
    """A short name for each model; by what was typed where two would have the same."""
    names = [one.source.name + ("" if one.step is None else f":{one.step}") for one in found]
    return [name if names.count(name) == 1 else one.source.text for name, one in zip(names, found, strict=True)]


def set_rows(name: str, found: Sequence[Evaluated]) -> list[list[str]]:
    """The table of a set: a row for each metric, a column for each model and for each difference.

    A difference is that of the questions' scores from the first model's, beside reward/mean or, without a reward,
    exact_match.
    """
    results, names = [one.sets[name] for one in found], names_of(found)
    others = list(zip(names[1:], results[1:], strict=True))
    metrics = without_bounds(dict.fromkeys(metric for result in results for metric in result.values))
    metrics = [m for m in metrics if m not in COUNTS or any(r.values.get(m) for r in results)]
    rows = [[name, *names, *(f"{other} − {names[0]}" for other, _ in others)]]
    scored = next((metric for metric in SCORES if metric in metrics), None)
    for metric in metrics:
        values = [interval_text(metric, result.values) for result in results]
        rows.append([metric, *values, *(_difference(results[0], r) if metric == scored else "" for _, r in others)])
    return rows


SCORES = ("reward/mean", "accuracy", "exact_match")  # what `question_scores` are, the first that was measured
COUNTS = ("reward/num_failed",)  # of which 0 is not shown


def _difference(first: SetResult, other: SetResult) -> str:
    difference = paired_difference(first.scores, other.scores)
    if not (text := interval_text("difference", difference)):
        return "– (no questions in common)"
    most = max(len(first.scores), len(other.scores))
    return text if difference["questions"] == most else f"{text} ({difference['questions']:.0f} of {most} questions)"


def write_results(found: Sequence[Evaluated], sets: Sequence[EvaluationSet]) -> Path:
    """Write results.json, samples.jsonl and report.html into a new folder; returns it.

    A source that is a run gets a line in its evaluations.jsonl, which `run report` and `run diff` show. Raises
    StorageError.
    """
    now = datetime.now(UTC)
    folder = make_unique(OUTPUTS / "eval", now.strftime("%Y-%m-%d-%H%M%S"), "folder of the evaluation")
    names = names_of(found)
    models = [
        {"name": name, "source": one.source.text, "step": one.step, "weights": one.weights}
        for name, one in zip(names, found, strict=True)
    ]
    content = {
        "created": now.isoformat(timespec="seconds"),
        "models": models,
        "sets": {one.name: _set_record(one, found, names) for one in sets},
    }
    write_atomic(folder / "results.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    lines = (
        json.dumps({"model": name, **sample}, ensure_ascii=False)
        for name, one in zip(names, found, strict=True)
        for result in one.sets.values()
        for sample in result.samples
    )
    write_atomic(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    _write_page(found, sets, folder / "report.html")
    for one, model in zip(found, models, strict=True):
        if one.source.kind == "run":
            values = {f"{name}/{key}": v for name, result in one.sets.items() for key, v in result.values.items()}
            measured = {own.name: set_definition(own, one.sets[own.name]) for own in sets}
            line = {"created": content["created"], **model, "results": str(folder), "sets": measured, "values": values}
            append_evaluation(one.source, line)
    return folder


def set_definition(one: EvaluationSet, result: SetResult) -> dict[str, Any]:
    """What is the same in comparable evaluations: questions, sampling, and how answers are scored."""
    from runner.data.tokenization import digest

    options = one.options.model_dump(mode="json", exclude={"data", "reward", "environment", "limit"})
    names = {group: _definition(config) for group, config in one.components.items() if group != "data"}
    return {"questions": len(result.scores), "question_digest": digest(sorted(result.scores))[:12], **options, **names}


def _definition(config: ComponentConfig) -> str:
    """A component's name, and a digest of its options, without the folders of files."""
    from runner.data.tokenization import digest

    options = re.sub(r'"/[^"]*/', '"', config.model_dump_json())
    return f"{config.name} ({digest(options)[:8]})"


def append_evaluation(source: ModelSource, record: Mapping[str, Any]) -> None:
    """Add a line to evaluations.jsonl of a run, or print that it cannot be written to."""
    path = RunFolder(Path(source.path)).evaluations
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        print(
            f"warning: cannot write {path}: {error.strerror}; the results are in {record['results']}", file=sys.stderr
        )


def _set_record(one: EvaluationSet, found: Sequence[Evaluated], names: Sequence[str]) -> dict[str, Any]:
    first = found[0].sets[one.name].scores
    components = {group: config.model_dump(mode="json") for group, config in one.components.items()}
    return {
        **one.options.model_dump(mode="json"),
        **components,
        "values": {name: model.sets[one.name].values for name, model in zip(names, found, strict=True)},
        "scores": {name: model.sets[one.name].scores for name, model in zip(names, found, strict=True)},
        "differences": {
            name: paired_difference(first, model.sets[one.name].scores)
            for name, model in zip(names[1:], found[1:], strict=True)
        },
    }


def _write_page(found: Sequence[Evaluated], sets: Sequence[EvaluationSet], path: Path) -> None:
    names = names_of(found)
    page = Page("Evaluation", " · ".join(names))
    for one in sets:
        page.head(one.name)
        head, *rows = set_rows(one.name, found)
        page.table(head, [TableRow(row) for row in rows])
        page.parts.append(answers_table(names, _answers_side_by_side([model.sets[one.name] for model in found])))
    page.write(path)


SHOWN = 8  # questions on the page


def _answers_side_by_side(results: Sequence[SetResult]) -> list[tuple[str, list[Mapping[str, Any] | None]]]:
    """The prompts of the first model's first answers, each with the answers of all models."""
    found = [dict(zip(result.scores, result.samples, strict=False)) for result in results]
    first = list(found[0].items())[:SHOWN]
    return [(str(sample["prompt"]), [by_key.get(key) for by_key in found]) for key, sample in first]


def print_results(found: Sequence[Evaluated], sets: Sequence[EvaluationSet], folder: Path) -> None:
    """Print the tables, and the paths of the result files."""
    for one in sets:
        print_text("\n".join([*align_columns(set_rows(one.name, found)), ""]))
    print_text(labeled_line("results", display_path(folder / "results.json")))
    print_text(labeled_line("report", display_path(folder / "report.html")))
