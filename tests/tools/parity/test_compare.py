"""What a comparison finds in two recordings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.core.tolerance import TOLERANCES
from runner.tools.parity.compare import compare, comparison_lines, disagreement_text, refuse_other_job, relative
from runner.tools.parity.recording import Recording, TensorSketch

NAMES = ("embed", "layers.0.norm", "layers.0.o_proj", "layers.0", "norm")


def recorded(precision: str = "float32") -> Recording:
    one = TensorSketch((4,), 2.0, np.ones(4))
    kinds = ("input", "output", "gradient")
    return Recording(
        {},
        {"device": {"name": "cpu", "matmul_precision": precision}, "versions": {"torch": "2"}},
        [{"train/loss": 2.0, "nll": 1.0, "train/grad_norm": 4.0}, {"train/loss": 4.0, "train/grad_norm": 4.0}],
        {f"{kind}/policy/{name}": one for kind in kinds for name in NAMES},
    )


def with_prints(apart: dict[str, float]) -> Recording:
    """The same, with prints that are so far away, relatively."""
    base = recorded()
    moved = {
        name: replace(one, sums=one.sums + apart.get(name, 0.0) * np.array([2.0, 0, 0, 0]))
        for name, one in base.prints.items()
    }
    return replace(base, prints=moved)


def test_the_mean_is_of_the_relative_errors() -> None:
    here = replace(recorded(), steps=[{"train/loss": 2.02, "train/grad_norm": 4.0}, recorded().steps[1]])
    found = compare(recorded(), here, sampled=False)
    assert found.loss_error == pytest.approx(0.005)
    assert found.agrees(0.0051) and not found.agrees(0.0049)
    assert "above the tolerance" in disagreement_text(found, 0.0049) and "check the optimizer" in disagreement_text(
        found, 0
    )


def test_samples_are_compared_by_their_likelihood_where_a_step_has_some() -> None:
    found = compare(recorded(), recorded(), sampled=True)
    assert (found.series, len(found.steps), found.loss_error) == ("nll", 1, 0.0)


@pytest.mark.parametrize("missing", ["recorded", "here"])
def test_a_gradient_that_one_side_lacks_is_a_disagreement(missing: str) -> None:
    whole, name = recorded(), "layers.0.norm"
    prints = {key: one for key, one in whole.prints.items() if key != f"gradient/policy/{name}"}
    sides = {"recorded": whole, "here": whole, missing: replace(whole, prints=prints)}
    found = compare(sides["recorded"], sides["here"], sampled=False)
    assert found.first_gradient is not None and found.first_gradient.name == f"policy/{name}"
    assert not found.agrees(0.005)


def test_the_relative_error_of_nothing_and_of_what_is_not_finite() -> None:
    assert relative(0.0, 0.0) == 0 and relative(0.0, 1e-9) == math.inf
    assert relative(1.0, math.nan) == relative(math.inf, 1.0) == math.inf and relative(-2.0, -1.0) == 0.5


def test_the_first_of_the_forward_pass_is_named_with_what_its_input_says() -> None:
    apart = {f"{kind}/policy/{name}": 0.3 for kind in ("input", "output") for name in NAMES[2:]}
    here = with_prints({**apart, "output/policy/layers.0.norm": 0.2})
    found = compare(recorded(), here, sampled=False)
    assert found.first_output is not None and not found.agrees(1.0), "though the losses agree"
    assert (found.first_output.name, found.first_output.taken) == ("policy/layers.0.norm", 0.0)
    assert "policy/layers.0.norm, whose output differs by 0.2 (bound 0.001) while its input" in disagreement_text(
        found, 1
    )


def test_where_the_input_differs_already_the_module_around_it_is_named() -> None:
    here = with_prints({"input/policy/layers.0.o_proj": 0.2, "output/policy/layers.0.o_proj": 0.2})
    said = disagreement_text(compare(recorded(), here, sampled=False), 1)
    assert "its input differs as much (0.2): the cause is what policy/layers.0 computes before it" in said


def test_the_first_gradient_is_the_last_of_the_forward_pass() -> None:
    here = with_prints({f"gradient/policy/{name}": 0.5 for name in NAMES[:3]})
    found = compare(recorded(), here, sampled=False)
    assert found.first_output is None and found.first_gradient is not None
    assert found.first_gradient.name == "policy/layers.0.o_proj"


def test_a_gradient_that_is_rounding_alone_is_judged_by_the_others() -> None:
    before, now = recorded(), recorded()
    for one, sign in ((before, 1), (now, -1)):
        noise = sign * 1e-6 * np.ones(4)
        one.prints["gradient/policy/embed"] = TensorSketch((4,), 2e-6, noise)  # type: ignore[index]
    found = compare(before, now, sampled=False)
    assert found.first_gradient is None and 0 < found.gradients[-1].distance < 1e-4


def test_another_layout_is_said_as_such() -> None:
    here = recorded()
    for name, one in list(here.prints.items()):
        here.prints[name] = replace(one, shape=(2, 2))  # type: ignore[index]
    said = disagreement_text(compare(recorded(), here, sampled=False), 1)
    assert "policy/embed, whose output is [4] recorded and [2, 2] here: see the choices above" in said


def test_the_report_of_a_comparison_has_a_row_for_each_step() -> None:
    found = compare(recorded(), with_prints({"output/policy/norm": 0.2}), sampled=False)
    report = list(comparison_lines(found, recorded(), recorded(), 0.005))
    assert [line.split()[:2] for line in report if line.lstrip()[:1] in "12"] == [["1", "2"], ["2", "4"]]
    assert "outputs of step 1: 5 compared, 1 beyond the bound 0.001; largest difference 0.2 (policy/norm)" in report
    assert "gradients of step 1: 5 compared, 0 beyond the bound 0.01; equal bit for bit" in report


def test_modules_that_only_one_side_called_are_counted() -> None:
    here = recorded()
    del here.prints["output/policy/norm"]  # type: ignore[attr-defined]
    found = compare(recorded(), here, sampled=False)
    assert (found.unmatched, len(found.outputs), found.agrees(0)) == (1, 4, True)


def test_steps_that_end_early_never_agree() -> None:
    found = compare(recorded(), replace(recorded(), ended="the loss is nan", steps=[]), sampled=False)
    assert found.loss_error == math.inf and not found.agrees(0.99)


def test_bounds_are_those_of_the_coarser_side() -> None:
    pairs = [
        (recorded(), recorded(), "float32"),
        (recorded(), recorded("tf32"), "tf32"),
        (recorded("bfloat16"), recorded("tf32"), "bfloat16"),
    ]
    for one, other, bounds in pairs:
        assert (
            compare(one, other, sampled=False).bounds is compare(other, one, sampled=False).bounds is TOLERANCES[bounds]
        )


def test_a_device_and_its_kernels_may_differ_and_nothing_that_is_learnt() -> None:
    words = ["+recipe=sft_demo", "device=cpu"]
    before = compose_job(words).spec.model_dump(mode="json")
    refuse_other_job(before, compose_job([*words, "device.threads=2", "model.gradient_checkpointing=true"]).spec)
    refuse_other_job(before, compose_job(["+recipe=sft_demo", "device=npu", "model.dtype=bfloat16"]).spec)
    with pytest.raises(SpecError) as caught:
        refuse_other_job(before, compose_job([*words, "seed=1", "model.layers=2", "optimizer=sgd"]).spec)
    keys = {problem.key for problem in caught.value.problems}
    assert {"seed", "model.layers", "optimizer.name"} <= keys and not any(key.startswith("device") for key in keys)
