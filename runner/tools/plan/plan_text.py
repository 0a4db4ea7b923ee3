"""A plan as it is printed, and as it is given to programs.

The grid of ranks as it is printed: which rank holds which part of a model, and on which machine.

stage 0, replica 1:  rank [(4 5) (6 7)]  shards of a replica side by side; [ ] context parallel, ( ) tensor parallel
sampler 0:  device (8 9)                 one that only samples, over two devices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from runner.core.micro_batches import PATCHES_PER_PLACE
from runner.device.cards import GIB, Card
from runner.model.auto_class import is_image_text
from runner.parallelism.mesh import Mesh
from runner.spec.job import JobSpec
from runner.tools.plan.estimate import FRAGMENTATION, Estimate, MemoryBand
from runner.tools.plan.measure import ASSUMED_LENGTH
from runner.tools.plan.rank_layout import StepPhase
from runner.tools.plan.remedies import Advice
from runner.tools.plan.rollout_memory import EngineMemory, SamplerDevices
from runner.tools.plan.traffic import matmul_precision, peak_flops
from runner.tracker.text import format_rate

FORMAT = 2  # of the JSON; grows when a field changes its meaning or goes
FITS = {"fits": "it fits", "may fit": "it may fit", "does not fit": "it does not fit"}


def plan_lines(spec: JobSpec, plan: Estimate, card: Card | None, advice: Advice | None) -> Iterator[str]:
    """The whole plan."""
    many = f"{spec.launch.world} + {spec.launch.samplers}" if spec.launch.samplers else f"{spec.launch.world}"
    on = f"{many} × {card.name} ({_gib(card.memory)} GiB)" if card else f"{many} × CPU"
    yield f"plan     {spec.name}: {_models(spec, plan)}, on {on}; shape from {plan.found}"
    yield from mesh_lines(plan.mesh, None if spec.launch.name == "ray" else spec.launch.devices, plan.samplers)
    yield ""
    yield from table(plan.phases)
    if plan.samplers:
        yield ""
        yield from table([StepPhase("always", plan.samplers.terms)], "one sampling device, GiB")
    yield ""
    if spec.data.max_length is None:
        yield f"rows     {ASSUMED_LENGTH} tokens assumed (data.max_length=null, and a plan reads no data)"
    yield from image_lines(plan.shape)
    peak = plan.peak
    most = max(peak.terms, key=lambda term: term.bytes)
    share = 100 * most.bytes / peak.bytes
    yield f"peak     {peak.name}: {_gib(peak.bytes)} GiB of tensors, of which {most.name} {share:.0f} %"
    if plan.mesh.pp > 1:
        yield f"         of {_stage(plan)}, which needs most"
    if plan.engine:
        yield f"engine   {_engine_text(plan.engine)}"
    if card:
        yield from _card_lines(plan, card, advice)
    if spec.algorithm.serves:
        yield "clients  one training client is counted; each further one adds its adapter and optimizer state"
    else:
        yield from _work(spec, plan, card)
        yield from _sampling(spec, plan, card)
    yield from _host_lines(spec, plan)


def image_lines(shape: Any) -> Iterator[str]:
    """What images cost, of the transformers config of a model that reads them."""
    if not is_image_text(shape):
        return
    vision, size = shape.vision_config, "the number that its image processor writes"
    if merge := getattr(vision, "spatial_merge_size", None):
        side = vision.patch_size * merge
        size = f"1 for {side} x {side} pixels, so that 1024 x 1024 are {round(1024 / side) ** 2}"
    elif most := getattr(shape, "image_seq_length", None):
        size = f"{most} for a tile of {vision.image_size[0]} x {vision.image_size[1]} pixels"
    yield f"images   tokens of an image: {size}; each counts as {1 + PATCHES_PER_PLACE} tokens of micro_batch_tokens"
    yield "note     not counted: the vision part's activations and operations, as a plan reads no images"


def _host_lines(spec: JobSpec, plan: Estimate) -> Iterator[str]:
    """What is in the memory of hosts, and what is not in the plan."""
    for term in plan.host:
        yield f"host     {_gib(term.bytes)} GiB of host memory per rank: {term.name}"
    where = "rank 0's machine" if spec.launch.samplers or spec.sampler.served else "each machine"
    for term in plan.shelf:
        yield f"shm      {_gib(term.bytes)} GiB of /dev/shm on {where}: {term.name}"
    if plan.mesh.ep > 1:
        yield "note     the plan assumes evenly used experts; otherwise some ranks need more"
    for part in plan.left_out:
        yield f"note     not counted: {part}"


def _engine_text(engine: EngineMemory) -> str:
    """What the engine's keys and values have room for."""
    said = f"{_gib(engine.pool)} GiB for the KV cache, room for {engine.rows} sequences of {engine.tokens} tokens"
    if engine.rows == 0:
        return (
            f"{said}; raise sampler.gpu_memory_utilization, or use more devices for it (sampler.tensor_parallel_size)"
        )
    if engine.rows < engine.wanted:
        return f"{said}; the job samples {engine.wanted} at once, the others wait"
    return f"{said}; the job samples {engine.wanted} at once"


def _models(spec: JobSpec, plan: Estimate) -> str:
    name = spec.model.source or spec.model.name
    adapter = "full fine-tuning" if spec.adapter.trains_base else f"adapter={spec.adapter.name}"
    first = next(iter(plan.models.values()))
    numbers = f"{format_rate(first.total)} parameters, {format_rate(first.all.trained)} trainable"
    roles = "" if len(plan.models) == 1 else f", one model each for {' and '.join(plan.models)}"
    return f"{name}, {adapter} ({numbers}{roles})"


def table(phases: Sequence[StepPhase], of: str = "one rank, GiB") -> Iterator[str]:
    """GiB of one device: a row for each term, a column for each phase of a step."""
    names = list(dict.fromkeys(term.name for phase in phases for term in phase.terms))
    width = max(map(len, [*names, of])) + 2
    yield of.ljust(width) + "".join(phase.name.rjust(11) for phase in phases)
    for name in names:
        found = [next((term.bytes for term in phase.terms if term.name == name), None) for phase in phases]
        yield name.ljust(width) + "".join(("" if b is None else _gib(b)).rjust(11) for b in found)
    yield "all tensors".ljust(width) + "".join(_gib(phase.bytes).rjust(11) for phase in phases)


def _card_lines(plan: Estimate, card: Card, advice: Advice | None) -> Iterator[str]:
    why = f"with runtime, communication buffers and up to {100 * (FRAGMENTATION - 1):.0f} % lost to fragmentation"
    own = plan.sampler_band(card)
    said = FITS[fit_verdict(plan, card)]
    yield f"card     {_band(plan.band(card), card)}, {why}{'' if own else f': {said}'}"
    if own:
        yield f"         {_band(own, card)} on each sampling device: {said}"
    if advice is None:
        return
    for change in advice.changes:
        yield f"change   {change.word}   {change.cost}"
    after = f"{_gib(advice.band.low)} to {_gib(advice.band.high)} GiB"
    if not advice.changes:
        yield "change   no option reduces it further: use more devices, or a smaller model"
    elif advice.fits:
        yield f"         then {after}: it fits"
    else:
        yield f"         then {after}: still too much; use more devices with parallelism=fsdp, or a smaller model"


def _band(band: MemoryBand, card: Card) -> str:
    high = f" to {_gib(band.high)}" if band.high > band.low else ""
    return f"{_gib(band.low)}{high} GiB of {_gib(card.memory)}"


def fit_verdict(plan: Estimate, card: Card) -> str:
    """fits, may fit, or does not fit."""
    if plan.fits(card):
        return "fits"
    starved = plan.engine is not None and plan.engine.rows == 0
    return "does not fit" if starved or plan.fullest_band(card).low > card.memory else "may fit"


def _stage(plan: Estimate) -> str:
    runs = [f"layers {start} to {end - 1}" if end - start > 1 else f"layer {start}" for start, end in plan.stage.runs]
    ends = [*(["the embedding"] if plan.stage.first else []), *(["the head"] if plan.stage.last else [])]
    return f"stage {plan.stage.number} ({', '.join([*runs, *ends])})"


def _work(spec: JobSpec, plan: Estimate, card: Card | None) -> Iterator[str]:
    work = plan.work
    of = "rank" if plan.mesh.world_size == plan.mesh.dp_size else "replica"
    cuts = f"up to {work.tokens} tokens per {of} (sequences of maximum length) in {work.micro_batches} micro-batches"
    again = f", and {_tera(work.recomputed_flops)} to recompute activations" if work.recomputed_flops else ""
    flops = f"{_tera(work.flops)} TFLOP per rank{again}"
    peak = peak_flops(spec, card)
    if card is None or peak is None:
        yield f"step     {cuts}: {flops}; this device's speed is not known"
    else:
        least = (work.flops + work.recomputed_flops) / peak / (1 - work.bubble)
        device = f"one device ({card.name}, {matmul_precision(spec)})"
        at = f"at least {least:.2g} s at the {_tera(peak)} TFLOP/s of {device}"
        yield f"step     {cuts}: {flops}"
        yield f"         {at}; a lower bound for the update alone, without sampling and waiting"
    if work.bubble:
        idle = f"a stage is idle for {100 * work.bubble:.0f} % of the step"
        yield f"bubble   {idle}; more micro-batches or virtual stages reduce it"
    if work.sent_bytes:
        yield f"traffic  {_gib(work.sent_bytes)} GiB sent by each rank per step{_split(work.sending)}"


def _sampling(spec: JobSpec, plan: Estimate, card: Card | None) -> Iterator[str]:
    """The least that sampling takes, and whether it is added to the update or hidden by it."""
    if plan.sampling_s is None or card is None:
        return
    hidden = spec.algorithm.steps_ahead() and spec.launch.samplers
    when = "during the update (algorithm.lag)" if hidden else "before the update"
    bound = f"at least {plan.sampling_s:.2g} s if every completion has the maximum length, {when}"
    yield f"sampling {bound}; a lower bound"


def _split(sending: Mapping[str, int]) -> str:
    """What the bytes are for, where there is more than one thing."""
    return f": {', '.join(f'{_gib(sent)} {name}' for name, sent in sending.items())}" if len(sending) > 1 else ""


def as_json(spec: JobSpec, plan: Estimate, card: Card | None, advice: Advice | None) -> dict[str, Any]:
    """The plan for programs: bytes, operations, and the words to be typed."""
    band, own = (plan.band(card), plan.sampler_band(card)) if card else (None, None)
    dims, samplers = plan.mesh.dims, dict[str, Any]()
    if plan.samplers is not None:
        samplers = {"devices": plan.samplers.devices, "processes": plan.samplers.count}
        samplers["terms"] = {term.name: term.bytes for term in plan.samplers.terms}
    return {
        "format": FORMAT,
        "name": spec.name,
        "world": spec.launch.world,
        "mesh": plan.mesh._asdict(),
        "ranks": [dict(zip(dims, place, strict=True)) for place in product(*map(range, dims.values()))],
        "stage": {"number": plan.stage.number, "layers": plan.stage.layers},
        "models": {role: {"trained": one.all.trained, "frozen": one.all.frozen} for role, one in plan.models.items()},
        "phases": {phase.name: {term.name: term.bytes for term in phase.terms} for phase in plan.phases},
        "peak_bytes": plan.peak.bytes,
        "samplers": samplers or None,
        "engine": None if plan.engine is None else asdict(plan.engine),
        "host": {term.name: term.bytes for term in plan.host},
        "shelf": {term.name: term.bytes for term in plan.shelf},
        "card": None if card is None else card.name,
        "band_bytes": None if band is None else [band.low, band.high],
        "band_of_samplers_bytes": None if own is None else [own.low, own.high],
        "verdict": None if card is None else fit_verdict(plan, card),
        "changes": [] if advice is None else [change.word for change in advice.changes],
        "step": asdict(plan.work) | {"sent_bytes": plan.work.sent_bytes, "sampling_s": plan.sampling_s},
        "left_out": list(plan.left_out),
    }


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def _gib(num_bytes: int) -> str:
    return f"{(gib := num_bytes / GIB):.{4 if gib < 0.1 else 2 if gib < 100 else 0}f}"


WIDEST = 16  # ranks in a row that are drawn one by one
LONGEST = 16  # rows that are drawn
BRACKETS = {
    "cp": ("[", "]", "context parallel: share the tokens of each sequence"),
    "tp": ("(", ")", "tensor parallel: share every layer"),
}


def mesh_lines(mesh: Mesh, per_node: int | None, samplers: SamplerDevices | None = None) -> Iterator[str]:
    """A row for each stage and replica of the model with its shards; the place of experts; samplers.

    per_node: ranks of a machine, None where it is not known before they are placed.
    """
    beside = f", and {samplers.devices} for sampling" if samplers else ""
    yield f"mesh     {mesh}{beside}"
    if mesh.world_size > 1:
        yield from _ranks(mesh, per_node)
    elif samplers:
        yield "  replica 0:  rank 0"
    if samplers:
        yield from _sampler_rows(mesh.world_size, samplers)


def _ranks(mesh: Mesh, per_node: int | None) -> Iterator[str]:
    rows = mesh.rank_groups("dp_shard", "cp", "tp")
    for at, ranks in enumerate(rows[:LONGEST]):
        where = f"   ({_machines(ranks, per_node)})" if per_node else ""
        yield f"  {_replica_name(mesh, at)}:  rank {_parts(mesh, ranks)}{where}"
    if len(rows) > LONGEST:
        yield f"  … {_replica_name(mesh, len(rows) - 1)}:  to rank {mesh.world_size - 1}"
    for name, (first, last, meaning) in BRACKETS.items():
        if mesh.dims[name] > 1:
            yield f"  {first} {last} {meaning}"
    if mesh.ep > 1:
        yield f"  experts of a layer are split over ranks {_expert_groups_text(mesh.expert_groups())}"


def _sampler_rows(world: int, samplers: SamplerDevices) -> Iterator[str]:
    """The devices after those of the ranks, with those in ( ) that share one sampler's layers."""
    for at in range(samplers.count)[:LONGEST]:
        first = world + at * samplers.cards
        devices = " ".join(str(first + part) for part in range(samplers.cards))
        yield f"  sampler {at}:  device {devices if samplers.cards == 1 else f'({devices})'}"
    if samplers.count > LONGEST:
        yield f"  … sampler {samplers.count - 1}:  to device {world + samplers.devices - 1}"


def _replica_name(mesh: Mesh, at: int) -> str:
    stage, copy = divmod(at, mesh.dp_replicate)
    names = [f"stage {stage}"] if mesh.pp > 1 else []
    return ", ".join([*names, f"replica {copy}"] if mesh.dp_replicate > 1 or mesh.pp == 1 else names)


def _parts(mesh: Mesh, ranks: Sequence[int]) -> str:
    """`ranks` of one copy, in brackets where several share a part."""
    width = len(str(mesh.world_size - 1))
    shown = [str(rank).rjust(width) for rank in ranks[:WIDEST]]
    for name, size in (("tp", mesh.tp), ("cp", mesh.cp)):
        if size > 1:
            first, last, _ = BRACKETS[name]
            shown = [f"{first}{' '.join(shown[at : at + size])}{last}" for at in range(0, len(shown), size)]
    return "  ".join(shown) + (f"  … {ranks[-1]}" if len(ranks) > WIDEST else "")


def _machines(ranks: Sequence[int], per_node: int) -> str:
    nodes = sorted({rank // per_node for rank in ranks})
    return f"machine {nodes[0]}" if len(nodes) == 1 else f"machines {nodes[0]} to {nodes[-1]}"


def _expert_groups_text(families: Sequence[Sequence[int]]) -> str:
    said = [" ".join(map(str, ranks[:WIDEST])) + (" …" if len(ranks) > WIDEST else "") for ranks in families]
    return " | ".join(said[:LONGEST]) + (" | …" if len(said) > LONGEST else "")
