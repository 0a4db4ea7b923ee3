"""The table of other frameworks' options: every answer names options that exist, and what is typed composes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.cli.conf import BESIDE
from runner.cli.config_sources import hydra_session
from runner.cli.hydra_compose import group_options
from runner.cli.job_builder import Composer, compose_job, decode_draft
from runner.core.errors import SpecError
from runner.spec import migrate
from runner.spec.base import COMMAND_LINE
from runner.spec.decode import decode
from runner.spec.migrate import BRACES, NAME, Entry, Job, Rule, table
from runner.spec.registry import built_in_registry, default_registry
from runner.spec.schema import OptionIndex, groups_of

REGISTRY = built_in_registry()
OPTIONS = {**OptionIndex(REGISTRY).options, **{name: {"": tuple(cls.model_fields)} for name, cls in BESIDE.items()}}
GROUPS = groups_of(REGISTRY)
ENTRIES = [entry for _, entries in table().pages.values() for entry in entries]
HYDRAS = [entry for entry in ENTRIES if entry.keys[0].startswith("hydra")]
RL = ("grpo", "ppo", "opd")


def rules(rule: Rule, algorithms: str = "", value: Any = None) -> Iterator[tuple[str, Any, Rule]]:
    """(algorithms, value, rule) of each case."""
    if isinstance(rule, str):
        yield algorithms, value, rule
        return
    for names, inner in rule.get("by", {}).items():
        yield from rules(inner, names, value)
    for inner in rule.get("with", {}).values():
        yield from rules(inner, algorithms, value)
    for names, inner in rule.get("values", {}).items():
        yield from rules(inner, algorithms, migrate.format_value(names).split()[0])
    if rule.keys() & {"to", "say"}:
        yield algorithms, value, rule


CASES = [(entry, *case) for entry in ENTRIES for case in rules(entry.rule)]


def words_of(rule: Rule) -> list[str]:
    return migrate._split(migrate._parts(rule)[0])


@pytest.fixture(scope="module")
def members() -> dict[str, set[str]]:
    """What can be chosen for each group, presets included."""
    with hydra_session(REGISTRY) as loader:
        return {group: set(group_options(loader.get_sources(), group)) for group in GROUPS}


def exists(key: str) -> bool:
    group, _, leaf = key.rpartition(".")
    return any(leaf in names for names in OPTIONS.get(group, {}).values())


def test_each_answer_names_options_and_components_that_exist(members: Mapping[str, set[str]]) -> None:
    wrong = []
    for entry, _, _, rule in CASES:
        for word in words_of(rule):
            key, _, value = word.partition("=")
            if "." not in key and key in GROUPS:
                wrong += [] if value in members[key] else [(entry.keys[0], word)]
            elif not exists(key):
                wrong.append((entry.keys[0], word))
    assert wrong == []


def test_each_option_that_a_sentence_or_a_formula_names_exists() -> None:
    ours = re.compile(rf"(?<![\w./-])((?:{'|'.join((*GROUPS, *BESIDE, 'evaluation', 'watch'))})\.[a-z_0-9]+)\b(?!\.)")
    texts = [(e.keys[0], migrate._parts(rule)[1]) for e, _, _, rule in CASES]
    texts += [(name, text) for page in (table().flags, table().commands, table().absent) for name, text in page.items()]
    texts += [(e.keys[0], " ".join(BRACES.findall(word))) for e, _, _, rule in CASES for word in words_of(rule)]
    theirs = {key for key in table().entries if "." in key}
    wrong = {
        (where, key) for where, text in texts for key in ours.findall(text) if key not in theirs and not exists(key)
    }
    assert wrong == set()


def test_a_formula_reads_what_is_ours_or_theirs() -> None:
    names = {
        n
        for *_, rule in CASES
        for w in words_of(rule)
        for b in BRACES.findall(w)
        if b
        for n in NAME.findall(b.partition(":")[2] or b)
    }
    words = {"it", "items", "compute_score", "tokens_per_row", "tokens_per_completion"}
    known = {part for name in names for part in name.split("|")} - words
    assert [n for n in known if not (n in table().entries or exists(n) or n[0].isdigit())] == []


def test_no_key_of_the_table_is_an_option() -> None:
    assert [key for key in table().entries if exists(key)] == []


def test_names_of_components_and_metrics_lead_somewhere(members: Mapping[str, set[str]]) -> None:
    assert [(g, n) for g, names in table().choices.items() for n in names.values() if n not in members[g]] == []
    assert [(g, n) for g, names in table().choices.items() for n in names if n in members[g]] == []
    assert all(re.fullmatch(r"[a-z_]+/[a-z_]+", ours) for ours in table().metrics.values())
    assert not table().metrics.keys() & set(table().metrics.values())
    for said in table().commands.values():
        assert not said.startswith("algorithm=") or said.partition("=")[2] in members["algorithm"]


def test_no_row_of_the_page_contradicts_the_one_above() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line.count(" | ") >= 3]
    twice = [
        (above, below)
        for above, below in pairwise(rows)
        if below[0] == "| " and below[2] == above[2] and "with" not in above[1] and below[1] in above[1].split(", ")
    ]
    assert twice == []


BASES = {
    "sft": ["algorithm=sft"],
    "cpt": ["algorithm=cpt"],
    "dpo": ["algorithm=dpo"],
    "kto": ["algorithm=kto"],
    "rm": ["algorithm=rm"],
    "distill": ["algorithm=distill", "algorithm.teacher=path"],
    "opd": ["algorithm=opd", "algorithm.teacher=path", "sampler=torch"],
    **{name: [f"algorithm={name}", "sampler=torch", "reward=exact"] for name in ("grpo", "ppo")},
}


def test_every_key_that_is_typed_is_answered() -> None:
    for algorithm in ("sft", "dpo", "grpo", "ppo"):
        base = compose_job([*BASES[algorithm], "model=tiny", "data=demo"]).data
        batches: list[dict[str, Any]] = []
        for entry in ENTRIES:
            for key in entry.keys if entry not in HYDRAS else ():
                place(batches, base, key.replace("*", "x"), entry.example)
        problems: dict[str, str] = {}
        for data in batches:
            with pytest.raises(SpecError) as caught:
                decode(data, dict.fromkeys(table().entries, COMMAND_LINE))
            problems |= {p.key: p.message for p in caught.value.problems}
        typed = [key.replace("*", "x") for e in ENTRIES if e not in HYDRAS for key in e.keys]
        assert [key for key in typed if not re.match(r"not an option of [^;]+; .", problems.get(key, ""))] == []
        assert [
            text for text in problems.values() if "{" in text and "'" not in text and "name: length" not in text
        ] == []


def place(batches: list[dict[str, Any]], base: Mapping[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in the first batch where nothing is in its way."""
    *outer, last = key.split(".")
    for number in range(len(batches) + 1):
        if number == len(batches):
            batches.append({name: dict(v) if isinstance(v, dict) else v for name, v in base.items()})
        section: Any = batches[number]
        for name in outer:
            section = section.setdefault(name, {}) if isinstance(section, dict) else None
        if isinstance(section, dict) and last not in section:
            section[last] = value
            return


# What a line needs beside it, as its option says; the first of a word that fits.
TWO_NODES = ["parallelism=ddp", "launch.devices=2", "launch.nodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1"]
NEEDS = {
    "model=hf": ["model.path=path"],
    "data=": ["data.path=path"],
    "data.mixture_weights=": ["data.path=[a,b]"],
    "data.max_eval_examples=": ["data.path=path"],
    "data.truncation=split": ["data=file", "data.path=path", "algorithm=cpt"],
    "data.streaming=": ["data=file", "data.path=path"],
    "data.truncation=": ["data=file", "data.path=path"],
    "parallelism.pp_virtual_stages=": ["parallelism=pp", "launch.devices=2"],
    "parallelism.cp_backend=": ["parallelism=cp", "launch.devices=2"],
    "parallelism.ep=": ["model=tiny_moe", "launch.devices=8"],
    "parallelism=": ["launch.devices=8"],
    "launch.devices=": ["parallelism=ddp"],
    "launch.node": TWO_NODES,
    "checkpoint.best_mode=": ["checkpoint.best=eval/loss"],
    "algorithm=opd": ["sampler=torch", "algorithm.teacher=path"],
    **{f"algorithm={name}": ["sampler=torch", "reward=exact"] for name in ("ppo", "grpo", "rein", "rloo")},
    "sampler.weight_sync=adapter": ["adapter=lora"],
    "sampler.sync_logprob_tolerance=": ["launch.samplers=1"],
    "sampler.weight_transfer_backend=": ["launch=ray", "launch.address=auto", "launch.samplers=1"],
    "launch.max_worker_restarts=": ["algorithm=grpo", "sampler=torch", "reward=exact", "launch.samplers=1"],
    "algorithm.loss_norm_length=": ["algorithm.loss_aggregation=seq_mean_token_sum_norm"],
    "algorithm.kl_in=": ["algorithm.kl_estimator=k3"],
    "algorithm.correction_m": ["algorithm.correction=mis"],
    "algorithm.max_resample_rounds=": ["algorithm.zero_variance=resample"],
    **{
        f"{key}=": ["device=cuda"]
        for key in ("sampler.gpu_memory_utilization", "sampler.sleep", "model.activation_offloading")
    },
    "sampler.timeout_s=": ["sampler=server", "sampler.url=http://127.0.0.1:1", "sampler.weight_sync=reload"],
    "parallelism.cpu_offload=": ["device=cuda"],
}


def settings(words: Sequence[str]) -> dict[str, str]:
    return {word.partition("=")[0]: word for word in words}


OURS = {key for entry in table().pages["ours"][1] for key in entry.keys}


def owners(words: Sequence[str]) -> list[str]:
    """`group=member` of the first member that has each option: who types our own old name has chosen one."""
    options = [word.partition("=")[0].rpartition(".")[::2] for word in words]
    return [f"{g}={next(n for n, names in OPTIONS[g].items() if leaf in names)}" for g, leaf in options if g in GROUPS]


def lines() -> dict[tuple[str, tuple[str, ...]], str]:
    """(algorithm, words) of every answer that is words, and the key that has it."""
    found: dict[tuple[str, tuple[str, ...]], str] = {}
    for entry, algorithms, value, rule in CASES:
        if entry in HYDRAS or not words_of(rule):
            continue
        touched = {word.partition("=")[0].partition(".")[0] for word in words_of(rule)}
        usual = "grpo" if touched & {"sampler", "reward", "environment"} else "sft"
        if entry.keys[0] in OURS and "algorithm" in touched:
            usual = settings(owners(words_of(rule)))["algorithm"].partition("=")[2]
        algorithm = algorithms.split()[0] if algorithms else usual
        job = Job({"algorithm": algorithm}, DATA, TYPED)
        [answer] = table().answers(Entry(entry.keys, "", rule), entry.example if value is None else value, job)
        if not answer.formulas:
            found.setdefault((algorithm, tuple(word.strip("'") for word in answer.words)), entry.keys[0])
    return found


DATA = {
    **{"launch.devices": 8, "algorithm.batch_size": 32, "algorithm.group_size": 8, "steps": 100, "optimizer.lr": 1e-5},
    **{"data.max_length": 1024, "sampler.max_new_tokens": 256},
}
TYPED = {"per_device_train_batch_size": 4, "data.train_batch_size": 256}


def test_each_line_that_is_to_be_typed_composes() -> None:
    failed = list[Any]()
    together: dict[tuple[str, ...], list[dict[str, str]]] = {}  # choices → lines that set different options
    alone: dict[str, list[dict[str, str]]] = {}
    for (algorithm, words), key in lines().items():
        found = [beside for word in words for need, beside in NEEDS.items() if word.startswith(need)]
        typed = settings(["model=tiny", "data=demo", *BASES[algorithm]])
        typed |= settings(owners(words)) if key in OURS else {}
        typed |= settings([word for beside in found for word in beside]) | settings(words)
        alone.setdefault(key, []).append(typed)
        choices = tuple(sorted(word for name, word in typed.items() if name in GROUPS))
        batches = together.setdefault(choices, [])
        fitting = (b for b in batches if all(b.get(name, word) == word for name, word in typed.items()))
        batch = next(fitting, None)
        if batch is None:
            batches.append(dict(typed))
        else:
            batch |= typed
    with hydra_session(default_registry()) as loader:
        composer = Composer(loader)

        def problems(typed: Mapping[str, str]) -> list[str]:
            try:
                decode_draft(composer.draft(list(typed.values())), default_registry())
            except SpecError as error:
                return [f"{p.key}: {p.message}" for p in error.problems]
            return []

        for batch in (batch for batches in together.values() for batch in batches):
            if problems(batch):  # of one line, or only of lines that nobody types together
                mine = [
                    (key, typed)
                    for key, several in alone.items()
                    for typed in several
                    if typed.items() <= batch.items()
                ]
                failed += [(key, typed, said) for key, typed in mine if (said := problems(typed))]
    assert failed == []
