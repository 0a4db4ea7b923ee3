"""Tolerances by data type: how far two correct computations of the same numbers may differ.

Measured where a docstring or page beside the check says so; the rest is the data type's rounding with room. Knows no
torch: a data type goes by its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences that rounding explains.

    values:    of what one operator or model gives, relative to the largest of them (probes when a model is built)
    output:    of a module's output in a whole model, relative to its norm (run parity)
    gradient:  of a parameter's gradient, relative to its norm (run parity)
    logprobs:  mean absolute difference of log-probabilities of two engines with the same weights, in nats (weight sync)
    """

    values: float
    output: float
    gradient: float
    logprobs: float


TOLERANCES = {
    "float64": Tolerance(values=1e-9, output=1e-8, gradient=1e-7, logprobs=1e-6),
    "float32": Tolerance(values=1e-4, output=1e-3, gradient=1e-2, logprobs=1e-3),
    "tf32": Tolerance(values=1e-2, output=1e-2, gradient=5e-2, logprobs=3e-2),  # float32 whose products are in TF32
    "bfloat16": Tolerance(values=5e-2, output=5e-2, gradient=6e-2, logprobs=3e-1),
}


def tolerance_of(*dtypes: str) -> Tolerance:
    """That of the coarsest of some data types; of one that the table lacks, as of bfloat16."""
    order = list(TOLERANCES)
    places = [order.index(name) if name in TOLERANCES else len(order) - 1 for name in dtypes]
    return TOLERANCES[order[max(places)]]
