"""Low-rank adapters through peft: the base model is frozen, small matrices beside it are trained."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from runner.adapter.config import LoraConfig
from runner.core.errors import Problem, SpecError
from runner.core.rng import derive_seed
from runner.interfaces import Decide, TrainableModel

M = TypeVar("M", bound=TrainableModel)


def attach(config: LoraConfig, model: M, *, decide: Decide) -> M:
    """`model` inside a peft model; adapter weights are drawn from the model's seed, always in float32.

    Use the result instead of `model`, whose modules it has changed. Raises SpecError for module names that the
    model does not have, or that peft cannot adapt.
    """
    import peft

    _check_names(config, model.inner)
    scalar = hasattr(model.inner, "score")  # a head of random weights, which has to learn
    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared int, used as a float
        lora_dropout=config.dropout,
        target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
        modules_to_save=list(config.modules_to_save) or None,
        use_dora=config.dora,
        use_rslora=config.rslora,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws on the CPU
            # peft asks transformers under an older name; nothing a user could do about
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # ranks that peft itself sets for experts, whose gate and up are one tensor, and takes
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            torch.manual_seed(derive_seed(model.seed, "adapter"))
            module: Any = peft.get_peft_model(model.inner, settings)
    except ValueError as error:
        raise SpecError([Problem("adapter.targets", f"peft cannot adapt this: {error}")]) from error
    for parameter in module.parameters():
        if parameter.requires_grad:  # peft leaves a head that is trained beside the adapter in the base's type
            parameter.data = parameter.data.float()
    return model.with_peft_module(module, decide=decide)


def _check_names(config: LoraConfig, causal: nn.Module) -> None:
    """peft passes over an unknown name as long as another one is known; here each must name something."""
    wanted = {"adapter.modules_to_save": config.modules_to_save}
    if not isinstance(config.targets, str):
        wanted["adapter.targets"] = config.targets
    names = [name for name, _ in causal.named_modules()]
    found = [
        Problem(key, f"no module named {target!r} in the model; it has {', '.join(_adaptable_names(causal))}")
        for key, targets in wanted.items()
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in names)
    ]
    if found:
        raise SpecError(found)


def _adaptable_names(causal: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Embedding)
    return sorted({name.rpartition(".")[2] for name, module in causal.named_modules() if isinstance(module, kinds)})
