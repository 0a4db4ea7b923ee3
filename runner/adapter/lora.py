"""Low-rank adapters through peft: the base model is frozen, small matrices beside it are trained."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.core.errors import DataError, Problem, SpecError
from runner.core.progress_bars import no_peft_warnings
from runner.core.quantized_weight import QuantizedWeight
from runner.core.rng import derive_seed
from runner.interfaces import Decide, TrainableModel

M = TypeVar("M", bound=TrainableModel)


def train_all(config: NoAdapterConfig, model: M, *, decide: Decide) -> M:
    """The same model with all parameters trainable (full fine-tuning); an adapter it came with is merged."""
    if model.module is not model.inner:
        decide.record_fact("adapter", "merged into its base", f"{_origin(model)}; adapter=none trains all weights")
        model = model.merge_adapter(decide=decide)
    model.module.requires_grad_(True)
    model.freeze_parts(decide)
    return model


def _origin(model: TrainableModel) -> str:
    return f"the model came with the adapter {model.weights_source.adapter}"


def attach(config: LoraConfig, model: M, *, decide: Decide) -> M:
    """`model` inside a peft model; adapter weights are drawn from the model's seed, always in float32.

    Use the result instead of `model`, whose modules it has changed. Raises SpecError for module names that the
    model does not have, or that peft cannot adapt. A model that came with an adapter continues it, as it is.
    """
    if model.module is not model.inner:
        return _continue_adapter(config, model, decide)
    import peft

    _check_names(config, model.inner)
    scalar = hasattr(model.inner, "score")  # a head of random weights, which has to learn
    frozen = model.freeze_parts(decide)
    left_out = _unadaptable_linears(model.inner, frozen) if config.targets == "all-linear" else {}
    if left_out:
        names = ", ".join(sorted({_short_name(name) for name in left_out}))
        decide("adapter.targets", "all-linear", f"all-linear except {names}", next(iter(left_out.values())))
    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        revision=model.weights_source.commit,  # of the base, which the adapter's config records
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared int, used as a float
        lora_dropout=config.dropout,
        exclude_modules=sorted({*left_out, *frozen}) or None,
        target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
        modules_to_save=list(config.modules_to_save) or None,
        use_dora=config.dora,
        use_rslora=config.rslora,
    )
    try:
        with torch.random.fork_rng(devices=[]), no_peft_warnings():  # peft draws on the CPU
            torch.manual_seed(derive_seed(model.seed, "adapter"))
            module: Any = peft.get_peft_model(model.inner, settings)
    except (TypeError, ValueError) as error:
        option = "modules_to_save" if isinstance(error, TypeError) else "targets"
        raise SpecError([Problem(f"adapter.{option}", f"peft cannot add the adapter: {error}")]) from error
    _report_lost_targets(config, model.inner, settings.exclude_modules or (), decide)
    for parameter in module.parameters():
        if parameter.requires_grad and isinstance(parameter, QuantizedWeight):
            text = "they are trained, and the base's linear layers are quantized; leave them or model.quantization out"
            raise SpecError([Problem("adapter.modules_to_save", text)])
        if parameter.requires_grad:  # peft leaves a head that is trained beside the adapter in the base's type
            parameter.data = parameter.data.float()
    return model.with_peft_module(module, decide=decide)


def _report_lost_targets(config: LoraConfig, inner: Any, excluded: Collection[str], decide: Decide) -> None:
    """Say which requested modules got no adapter. Raises SpecError where a frozen one got one.

    peft takes names such as up_proj for those of experts alone, and adapts routers by all-linear.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    wanted, adapted = _module_sets(inner, config.targets, BaseTunerLayer)
    if both := sorted(adapted & {*excluded}):
        text = f"{both[0]} gets one, but model.freeze excludes it; name other modules, e.g. [q_proj,v_proj,up_proj]"
        raise SpecError([Problem("adapter.targets", text)])
    if lost := sorted(wanted - adapted - {*excluded}):
        shown = config.targets if isinstance(config.targets, str) else f"[{','.join(config.targets)}]"
        reason = f"peft means the experts by {', '.join(sorted({_short_name(name) for name in lost}))}"
        decide("adapter.targets", shown, f"all but {len(lost)} modules, e.g. {lost[0]}", reason)


# --- adapters that join and leave a base that they share ---


def prepare_shared_base(config: LoraConfig, model: M, *, decide: Decide) -> M:
    """The model, frozen, inside a peft model whose linear layers and LM head `add_lora` can adapt.

    All of these layers get an adapter of rank 1 here, which is never trained and adds nothing, so that none has to be
    replaced once the model is sharded. Raises SpecError for a model that came with an adapter.
    """
    if model.module is not model.inner:
        raise SpecError([Problem("model.path", f"{_origin(model)}; merge it first (run export --merge)")])
    inner: Any = model.inner
    frozen = model.freeze_parts(decide)
    left_out = {*_unadaptable_linears(inner, frozen), *frozen}
    head = inner.get_output_embeddings()
    linears = [name for name, part in inner.named_modules() if type(part).__name__ in LINEARS or part is head]
    targets = tuple(name for name in linears if name not in left_out)
    if experts := [name for name, one in inner.named_parameters() if ".experts." in name and one.ndim > 2]:
        reason = f"clients adapt linear layers; {experts[0]} is no such layer"
        decide("adapter.targets", "all layers", "all but experts and routers", reason)
    model = attach(config.model_copy(update={"rank": 1, "targets": targets}), model, decide=decide)
    model.module.requires_grad_(False)
    return model


LINEARS = ("Linear", "Conv1D")  # what peft means by all-linear
Part = Literal["attn", "mlp", "unembed"]


def add_lora(
    model: TrainableModel, name: str, *, rank: int, alpha: float, seed: int, parts: Collection[Part], base: str
) -> None:
    """Add an adapter to a `prepare_shared_base`; its weights are those of a job with this seed.

    parts: which layers it adapts; unembed: the LM head; base: the model that its config names. Raises DataError if the
    model has no such layers.
    """
    import peft

    layers = _adapted_modules(model)
    targets = [path for path, part in layers.items() if part in parts]
    if not targets:
        raise DataError(f"the model has no layers of {', '.join(sorted(parts)) or 'no part'}; set another train_ flag")
    short = sorted({path.rpartition(".")[2] for path in targets})
    is_exact = [path for path in layers if path.rpartition(".")[2] in short] == targets
    settings: Any = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # see `attach`
        target_modules=short if is_exact else targets,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(derive_seed(seed, "weights"), "adapter"))
        model.add_adapter(name, settings)
    settings.base_model_name_or_path = base


def _adapted_modules(model: TrainableModel) -> dict[str, Part]:
    """The layers of a `prepare_shared_base`, by their paths in the transformers model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.inner.get_output_embeddings()
    found: dict[str, Part] = {}
    for path, part in model.inner.named_modules():
        if isinstance(part, BaseTunerLayer):
            found[path] = "unembed" if part is head else "attn" if "attn" in path or "attention" in path else "mlp"
    return found


def _unadaptable_linears(inner: Any, frozen: Collection[str]) -> dict[str, str]:
    """Linears outside of frozen parts that all-linear excludes, by full name, with the reason.

    Those whose output is no plain product, and those that a trial on the meta device excludes.
    """
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    linears = {n: part for n, part in inner.named_modules() if isinstance(part, nn.Linear) and part is not head}
    linears = {n: part for n, part in linears.items() if n not in frozen}
    found = {
        name: f"{type(part).__name__} is a linear layer whose output is not a matrix product"
        for name, part in linears.items()
        if not _is_matrix_product(part)
    }
    refused = _refused_names(inner, {name.rpartition(".")[2] for name in linears})
    return found | {name: why for name in linears if (why := refused.get(name.rpartition(".")[2]))}


@torch.no_grad()
def _is_matrix_product(part: nn.Linear) -> bool:
    """Whether a linear layer, perhaps with a forward of its own, gives on one row what `nn.Linear` gives."""
    if type(part).forward is nn.Linear.forward:
        return True
    row = torch.linspace(-1, 1, part.in_features, dtype=part.weight.dtype, device=part.weight.device)[None]
    wanted = nn.functional.linear(row, part.weight, part.bias)
    got: object = part(row)
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return False
    return got.is_meta or torch.allclose(got, wanted, rtol=1e-2, atol=1e-2)


def _short_name(name: str) -> str:
    """The last part of a module's name, with the one before it where it is a number."""
    *_, parent, last = ("", *name.split("."))
    return f"{parent}.{last}" if last.isdecimal() else last


def _refused_names(inner: Any, names: set[str]) -> dict[str, str]:
    """The last parts of module names that no adapter can be at in this architecture, and why.

    Either peft refuses them, or the model reads their weights without calling them. None where the architecture cannot
    be made without numbers, so that peft itself says it of the model.
    """
    if (blank := _blank_copy(inner)) is None:
        return {}
    called = {name.rpartition(".")[2] for name in _called_modules(blank)}
    found = dict.fromkeys(names - called, "the model reads its weights without calling the module") if called else {}
    if _peft_objection(blank, sorted(names - found.keys())) is None:  # together: some are targets only with others
        return found
    for name in sorted(names - found.keys()):
        if (objection := _peft_objection(_blank_copy(inner), [name])) is not None:
            found[name] = objection
    return found


def _peft_objection(blank: Any, names: list[str]) -> str | None:
    """What peft says against these targets in a model, which is changed by the trial; None = nothing."""
    import peft

    if not names:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=names), blank, low_cpu_mem_usage=True)
    except ValueError as error:
        return " ".join(str(error).split())[:160]
    return None


def _blank_copy(inner: Any) -> Any:
    """A model of the same shapes without numbers; None where its own code cannot make one."""
    config = deepcopy(inner.config)
    config._attn_implementation = "eager"  # not the one of packed rows, which a plain pass cannot run
    try:
        with torch.device("meta"):
            return type(inner)(config)
    except Exception:  # a model's own code
        return None


@torch.no_grad()
def _called_modules(blank: Any) -> set[str]:
    """The names of the modules that a pass over text calls; none where the pass fails on `meta`."""
    names = {part: name for name, part in blank.named_modules()}
    called = set[str]()
    hooks = [part.register_forward_hook(lambda part, *_: called.add(names[part])) for part in names]
    try:
        blank(input_ids=torch.zeros((1, 4), dtype=torch.long, device="meta"), use_cache=False)
    except Exception:  # a model whose path depends on numbers
        return set()
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _continue_adapter(config: LoraConfig, model: M, decide: Decide) -> M:
    """The model with the adapter that it came with, which keeps its options.

    An option that has its default gives way, with a line. Raises SpecError for others that the adapter does not have.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    module: Any = model.module
    there = module.peft_config[module.active_adapter]
    decide.record_fact("adapter", "continued", _origin(model))
    pairs: dict[str, tuple[Any, Any]] = {
        "rank": (config.rank, there.r),
        "alpha": (config.alpha, there.lora_alpha),
        "dropout": (config.dropout, there.lora_dropout),
        "dora": (config.dora, there.use_dora),
        "rslora": (config.rslora, there.use_rslora),
        "targets": _module_sets(model.inner, config.targets, BaseTunerLayer),
        "modules_to_save": _module_sets(model.inner, config.modules_to_save, ModulesToSaveWrapper),
    }
    refused = []
    for option, (ours, theirs) in pairs.items():
        if ours == theirs:
            continue
        typed = getattr(config, option)
        kept = f"[{','.join(sorted({_short_name(name) for name in theirs}))}]" if isinstance(theirs, set) else theirs
        if typed == LoraConfig.model_fields[option].default:
            decide.record_fact(
                f"adapter.{option}", str(kept), f"of the loaded adapter; the default {typed} is not used"
            )
        else:
            shown = f"[{','.join(typed)}]" if isinstance(typed, tuple) else typed
            text = f"{shown}, but the adapter {model.weights_source.adapter} has {kept}; type adapter.{option}={kept}"
            refused.append(Problem(f"adapter.{option}", f"{text}, or adapter=none to merge it and train all weights"))
    if refused:
        raise SpecError(refused)
    before = len(model.trainable())
    model.freeze_parts(decide)
    if lost := before - len(model.trainable()):
        decide.record_fact("adapter", f"{lost} of {before} tensors frozen", "they are in parts that model.freeze keeps")
    return model


def _module_sets(inner: Any, wanted: str | Sequence[str], kind: type) -> tuple[set[str], set[str]]:
    """The modules that an option's names mean, and those of peft's `kind` that are there."""
    inside = (".lora_", ".original_module", ".modules_to_save.")  # peft's own
    parts = {name: part for name, part in inner.named_modules() if not any(mark in name for mark in inside)}
    there = {name for name, part in parts.items() if isinstance(part, kind)}
    if wanted == "all-linear":
        head = inner.get_output_embeddings()
        linears = {name for name, part in parts.items() if isinstance(part, nn.Linear) and part is not head}
        return {name.removesuffix(".base_layer") for name in linears}, there
    ends = tuple(f".{target}" for target in wanted)
    return {name for name in parts if f".{name}".endswith(ends)}, there


def _check_names(config: LoraConfig, causal: nn.Module) -> None:
    """peft passes over an unknown name as long as another one is known; here each must name something.

    A module, or a part of fused expert parameters, which peft knows by the names of the published weights.
    """
    wanted = {"adapter.modules_to_save": config.modules_to_save}
    if not isinstance(config.targets, str):
        wanted["adapter.targets"] = config.targets
    names = [name for name, _ in causal.named_modules()]
    found = [
        Problem(key, f"no module named {target!r} in the model; it has {', '.join(_adaptable_names(causal))}")
        for key, targets in wanted.items()
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in names)
        and (key != "adapter.targets" or "not found" in (_peft_objection(_blank_copy(causal), [target]) or ""))
    ]
    if found:
        raise SpecError(found)


def _adaptable_names(causal: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Embedding)
    return sorted({name.rpartition(".")[2] for name, module in causal.named_modules() if isinstance(module, kinds)})
