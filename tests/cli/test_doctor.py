"""`run doctor` on the command line: its words, its flags, and that it imports neither torch nor Hydra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.args import flags_of, parse
from runner.cli.doctor import _wanted
from runner.cli.main import main

HEAVY = {"torch", "transformers", "datasets", "peft", "wandb", "numpy", "hydra", "omegaconf"}


@pytest.mark.parametrize(
    "words",
    [["npu"], ["steps=1"], ["device=cpu", "x"], ["device=npu", "device=cpu"], ["device="]],
)
def test_device_sampler_and_launcher_alone_can_be_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    told = capsys.readouterr().err
    assert f"are expected, each once, not {' '.join(words)}" in told and "[device=auto|cpu|cuda|npu" in told


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("device=cudaa", "no device named 'cudaa'; did you mean 'cuda'? (auto, cpu, cuda, npu"),
        ("sampler=vlm", "no sampler named 'vlm'; did you mean 'vllm'?"),
        ("sampler=none", "no sampler named 'none' (torch, vllm, vllm_server)"),
    ],
)
def test_a_mistyped_name_gets_the_nearest(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", word]) == 2
    assert f"run doctor: {said}" in capsys.readouterr().err


def test_words_and_flags() -> None:
    args = parse(["doctor", "--json", "--no-trial", "device=npu"])
    assert (args.verb, args.json, args.no_trial, _wanted(args.words)) == (
        "doctor",
        True,
        True,
        ("npu", None, None),
    )
    assert _wanted(["launch=ray", "sampler=vllm"]) == ("auto", "vllm", "ray")
    assert {"--json", "--no-trial"} <= set(flags_of("doctor"))


def test_it_works_without_torch_and_hydra(workdir: Path) -> None:
    program = (
        "import sys\nfrom runner.cli.main import main\ncode = main(sys.argv[1:])\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\nassert not heavy, heavy\nsys.exit(code)"
    )
    words = ["doctor", "device=npu", "--no-trial", "--json"]
    env = {**os.environ, "PATH": str(workdir)}  # no npu-smi
    done = subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, timeout=110)
    report = json.loads(done.stdout)
    if not any(Path("/dev").glob("davinci[0-9]*")):
        assert (done.returncode, report["exit_code"], report["ready"]) == (2, 2, {"npu": False})
    assert "Traceback" not in done.stderr and list(workdir.iterdir()) == []
