"""The losses of what learns from given data, with the constants in force: what `run explain loss` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.algorithm.config import CptConfig, SftConfig
from runner.algorithm.distillation.config import DistillConfig
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig

PAIRS = {
    "sigmoid": "−log σ(β·(d_c − d_r))",
    "conservative": "−(1 − e)·log σ(β·(d_c − d_r)) − e·log σ(−β·(d_c − d_r))",
    "robust": "(−(1 − e)·log σ(β·(d_c − d_r)) + e·log σ(−β·(d_c − d_r))) / (1 − 2e)",
    "hinge": "max(0, 1 − β·(d_c − d_r))",
    "ipo": "(d_c − d_r − 1/(2β))²",
    "ipo_averaged": "(d_c/n_c − d_r/n_r − 1/(2β))²",
    "sigmoid_norm": "−log σ(β·(d_c/n_c − d_r/n_r))",
    "apo_zero": "1 − σ(β·d_c) + σ(β·d_r)",
    "apo_down": "σ(β·d_c) + 1 − σ(β·(d_c − d_r))",
    "simpo": "−log σ(β·(p_c/n_c − p_r/n_r) − γ)",
    "orpo": "−p_c/n_c − λ·log σ(log odds_c − log odds_r), odds of exp(p/n)",
    "cpo": "−log σ(β·(p_c − p_r)) − α·p_c",
    "cpo_averaged": "−log σ(β·(p_c − p_r)) − α·p_c/n_c",
}
DIVERGENCES = {
    "forward_kl": "KL(P ‖ Q)",
    "reverse_kl": "KL(Q ‖ P)",
    "jsd": "{beta:g}·KL(P ‖ M) + {rest:g}·KL(Q ‖ M), M = {beta:g}·P + {rest:g}·Q",
}
SYMBOLS = {"beta": "β", "label_smoothing": "e", "gamma": "γ", "lam": "λ", "alpha": "α"}
SUMS = "  p   the sum of log π over an answer's tokens, n their number; c the chosen answer, r the rejected one"
RATIOS = "  d   the sum of log π − log π_ref over an answer's tokens"


def likelihood(config: SftConfig | CptConfig, job: Any) -> Iterator[str]:
    """Of sft and cpt."""
    where = "the answers' tokens" if isinstance(config, SftConfig) else "every token of the text"
    yield f"loss = −Σ_t log π(token t) / N, over {where}; N = their number in the whole optimizer step"


def distillation(config: DistillConfig, job: Any) -> Iterator[str]:
    """Of distill."""
    t, top = config.temperature, config.top_k
    scaled, logits = ("", "the logits") if t == 1 else (f"{t:g}²·", f"the logits / {t:g}")
    more = f" − {config.sft_coef:g}·log π(token t)" if config.sft_coef else ""
    yield f"loss = Σ_t ({scaled}D_t{more}) / N, over the answers' tokens; N = their number in the whole optimizer step"
    formula = DIVERGENCES[config.divergence].format(beta=config.mixture, rest=1 - config.mixture)
    yield f"  D   {formula}   (divergence={config.divergence})"
    yield f"  P, Q   softmax of {logits} of the teacher and of the student; KL(P ‖ Q) = Σ P·(log P − log Q)"
    if top is not None:
        yield f"      over the teacher's {top} likeliest tokens and, as one event, all others   (top_k={top})"


def pairs(config: DpoConfig, job: Any) -> Iterator[str]:
    """Of dpo and its kin."""
    yield f"loss = mean over the pairs of the optimizer step of  {PAIRS[config.loss]}   (loss={config.loss})"
    for name, value in config.options().items():
        yield f"  {SYMBOLS[name]}   {value:g}"
    yield SUMS
    if config.frozen():
        yield RATIOS


def judged(config: KtoConfig, job: Any) -> Iterator[str]:
    """Of kto."""
    beta = config.beta
    yield "loss = mean over the answers of the optimizer step of"
    yield f"  {config.desirable_weight:g}·(1 − σ({beta:g}·(d − z))) for good answers"
    yield f"  {config.undesirable_weight:g}·(1 − σ({beta:g}·(z − d))) for bad ones"
    yield RATIOS.replace("an answer's", "the answer's")
    yield "  z   the mean of d over answers beside other prompts of the mini-batch, at least 0, without gradient"


def scores(config: RmConfig, job: Any) -> Iterator[str]:
    """Of a reward model."""
    margin = " − margin" if config.use_margin else ""
    centring = f" + {config.centring:g}·(s_c + s_r)²" if config.centring else ""
    yield f"loss = mean over the pairs of the optimizer step of  −log σ(s_c − s_r{margin}){centring}"
    yield "  s   the score of the whole row, read at its last token; c the chosen answer, r the rejected one"
