"""Tinker service on every rank: training clients over one base, and sampling.

    operation, the same on all ranks in the same order ──▶ a tenant: its adapter and optimizer, the base's view of it
                                                       └─▶ the engine: requests of this rank, a few tokens at a time

A training client is called a tenant here. The base is frozen; its layers hold the adapters of all tenants and of all
samplers, and every computation names the one that is active. So a tenant's numbers are those that it has alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from runner.adapter.lora import Part, add_lora
from runner.core.errors import DataError, RunnerError, TrainingDiverged
from runner.core.fsync_io import failpoint
from runner.core.rng import derive_seed
from runner.distributed.work_partition import run_on_rank0
from runner.inference.engine import GenerationRequest, SamplingParams, TokenEvent, TokenScore
from runner.inference.torch_engine import TorchEngine
from runner.interfaces import LOGPROBS, Decide, GenerativeModel, State
from runner.interfaces.learning import OptimSettings
from runner.optimizer.config import AdamWConfig
from runner.optimizer.optimizers import build_adamw
from runner.parallelism.parallel_context import ParallelContext
from runner.spec.job import JobSpec
from runner.tinker.checkpoints import CheckpointPath, CheckpointRecord, ClientStore, LoraSettings, now_text
from runner.tinker.losses import check_data, check_loss, pack_data, split_logprobs
from runner.tinker.messages import Datum, PassResult, SampleResult
from runner.trainer.learner import LocalLearner
from runner.trainer.optimizer_state import learner_state, load_parameters, restore_learner_state
from runner.weight_sync.weight_checksum import weights_digest


@dataclass(slots=True)
class Tenant:
    """A training client. peft_name: of its adapter in the base.

    parameters: of the adapter, by their names in a PEFT folder; steps: finished optimizer steps; saved: those in its
    newest state
    """

    learner: LocalLearner
    peft_name: str
    parameters: Mapping[str, torch.nn.Parameter]
    steps: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of a client: `count` answers to a prompt.

    prompt_logprobs: k of the top-k tokens of the prompt that are reported, None = no log-probabilities of it
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    count: int
    prompt_logprobs: int | None = None


@dataclass(slots=True)
class PendingSample:
    """A sampling request of this rank, and what there is of its answers.

    scores: of the prompt but its first token
    """

    request: SampleRequest
    key: str | None
    answers: list[list[TokenEvent]]
    scores: Sequence[TokenScore] | None = None

    def result(self) -> SampleResult | None:
        """The answers if they are complete."""
        if not all(answer and answer[-1].finish_reason for answer in self.answers):
            return None
        has_top, scores = bool(self.request.params.logprobs), self.scores
        if scores is None:
            return SampleResult(self.answers, has_top)
        top = [(), *(one.top_logprobs for one in scores)] if self.request.prompt_logprobs else None
        return SampleResult(self.answers, has_top, [None, *(one.logprob for one in scores)], top)


class TrainingService:
    """The verbs of the server. All ranks call the same ones, with the same arguments.

    A verb that raises RunnerError raises it on all ranks, and has changed nothing. base: the name of the base that
    adapters' configs get
    """

    def __init__(
        self,
        spec: JobSpec,
        model: GenerativeModel,
        world: ParallelContext,
        store: ClientStore,
        decide: Decide,
        base: str,
    ) -> None:
        self._spec, self._model, self._world, self._store = spec, model, world, store
        self._decide, self._base = decide, base
        self._tenants: dict[str, Tenant] = {}
        self._engine = TorchEngine(model, decide=decide, max_num_seqs=spec.sampler.max_concurrent or 1, adapters={})
        self._engine.leave_generation_mode()
        self._samplers: OrderedDict[str, str] = OrderedDict()  # what requests name → peft name, oldest first
        self._num_adapters = self._num_requests = 0
        self._running: dict[str, str | None] = {}  # requests of all ranks → the sampler's name
        self._own: dict[str, PendingSample] = {}  # those of this rank
        self._dropped: list[str] = []  # answers of this rank whose sampler was removed
        self.limits = model.limits()

    # --- training ---

    def create(
        self, model_id: str, lora: LoraSettings, source: CheckpointPath | None = None, with_optimizer: bool = False
    ) -> None:
        """Add a training client with a fresh adapter, or one that continues a checkpoint.

        Raises DataError if the base has none of its layers, and what `load` raises.
        """
        self._engine.leave_generation_mode()
        parts = [part for part in get_args(Part) if getattr(lora, f"train_{part}")]
        name = self._new_name()
        add_lora(self._model, name, rank=lora.rank, alpha=lora.alpha, seed=lora.seed, parts=parts, base=self._base)
        parameters = self._adapter_parameters(name)
        optimizer = build_adamw(AdamWConfig(), parameters=parameters, decide=self._decide)
        learner = LocalLearner(
            self._model,
            optimizer,
            lr=0.0,
            clip_norm=None,
            factor=float,
            budget=self._spec.algorithm.micro_batch_budget,
            seed=lora.seed,
            device=self._world.device.torch_device,
            peers=self._world.peers,
            gradients=self._world.gradient_reducer(self._model),
            drawing=self._world.replica_peers,
            during=partial(self._model.adapter_active, name),
        )
        self._tenants[model_id] = Tenant(learner, name, parameters)
        try:
            if source is not None:
                self.load(model_id, source, with_optimizer)
        except RunnerError:
            self.remove(model_id)
            raise

    def remove(self, model_id: str) -> None:
        """Free a training client's memory; nothing happens where there is none."""
        if (tenant := self._tenants.pop(model_id, None)) is not None:
            self._engine.leave_generation_mode()
            self._model.remove_adapter(tenant.peft_name)

    def run_pass(
        self, model_id: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, Any], forward_only: bool
    ) -> PassResult:
        """Log-probabilities, and unless `forward_only` the gradient, which adds to the one that there is.

        Raises DataError for what the loss cannot be computed of or is not finite.
        """
        learner = self._tenant(model_id).learner
        loss = check_loss(loss_fn, config)
        check_data(data, loss_fn, self.limits, forward_only=forward_only)
        batch = pack_data(data)
        self._engine.leave_generation_mode()
        try:
            if forward_only:
                outputs = learner.forward(batch, LOGPROBS)
            else:
                _, outputs = learner.forward_backward(batch, loss, LOGPROBS)
        except TrainingDiverged as error:
            text = "the loss is not finite, so its gradient was left out; check advantages, logprobs and weights"
            raise DataError(text) from error
        logprobs = outputs["logprobs"].cpu()
        total = loss.values(batch, logprobs).sum(dtype=torch.float64)
        used = batch.tokens["weight" if loss_fn == "cross_entropy" else "advantages"] != 0
        count = float((used & (batch.tokens["parent"] >= 0)).sum())
        return PassResult(split_logprobs(logprobs, data), {"loss:sum": float(total), "tokens:sum": count})

    def optim_step(self, model_id: str, settings: OptimSettings) -> dict[str, float]:
        """A step of AdamW; returns metrics by `name:reduction`.

        Without a gradient it changes nothing but the count, like torch's. Raises DataError, with the gradient cleared,
        if it is not finite.
        """
        tenant = self._tenant(model_id)
        self._engine.leave_generation_mode()
        try:
            metrics = tenant.learner.optim_step(settings).result()
        except TrainingDiverged as error:
            tenant.learner.optimizer.zero_grad(set_to_none=True)
            text = "the gradient is not finite, so the weights were not changed and the gradient is cleared"
            raise DataError(f"{text}; lower the learning rate, or load an earlier checkpoint") from error
        failpoint("tinker.optim_step")
        tenant.steps += 1
        return {"grad_norm:mean": metrics["train/grad_norm"], "lr:mean": metrics["train/lr"]}

    def save(
        self, target: CheckpointPath, overwrite: bool, expires: str | None, user_metadata: Mapping[str, str] | None
    ) -> None:
        """Write the adapter and, for `weights`, the optimizer's state. Raises DataError, StorageError."""
        tenant = self._tenant(target.model_id)
        groups = optimizer = None
        if target.kind == "weights":
            state = learner_state(tenant.parameters, tenant.learner.optimizer)
            groups = state["optimizer"]["groups"]
            optimizer = {name: value for name, value in state["tensors"].items() if name.startswith("optim/")}

        def write() -> None:
            module: Any = self._model.module
            config, digest = module.peft_config[tenant.peft_name], weights_digest(tenant.parameters)
            record = CheckpointRecord(tenant.steps, digest, now_text(), 0, expires, user_metadata, groups)
            self._store.write(target, record, tenant.parameters, config, optimizer, overwrite=overwrite)

        run_on_rank0(self._world.world_peers, write)
        if groups is not None:
            tenant.saved = tenant.steps

    def signal_checkpoints(self) -> list[CheckpointPath]:
        """Where training clients that have made steps since their last state are saved at a signal."""
        found = {id: one.steps for id, one in self._tenants.items() if one.steps != one.saved}
        return [CheckpointPath(id, "weights", f"signal-{steps:06d}") for id, steps in found.items()]

    def load(self, model_id: str, source: CheckpointPath, with_optimizer: bool) -> None:
        """Load an adapter and, if requested, the optimizer's state; without it the optimizer starts again.

        Gradients are cleared. Raises DataError, CheckpointError.
        """
        tenant = self._tenant(model_id)
        read = partial(self._store.read, source, optimizer=with_optimizer)
        record, adapter, state = run_on_rank0(self._world.world_peers, read)
        saved, own = ({name: value.shape for name, value in one.items()} for one in (adapter, tenant.parameters))
        if saved != own:
            raise DataError(f"{source} has another LoRA rank or targets than this client; create the client from it")
        tensors = {f"param/{name}": value for name, value in adapter.items()}
        if with_optimizer:
            restored: State = {"tensors": tensors | state, "optimizer": {"groups": record.optimizer, "values": {}}}
            restore_learner_state(tenant.parameters, tenant.learner.optimizer, restored)
        else:
            load_parameters(tenant.parameters, tensors)
            tenant.learner.optimizer.state.clear()
        tenant.learner.optimizer.zero_grad(set_to_none=True)
        tenant.steps = tenant.saved = record.step

    def publish(self, key: str, target: CheckpointPath, *more: Any) -> None:
        """Save an adapter for the sampler `key`, which continues with it from its next token on.

        more: arguments of `save`
        """
        self.save(target, *more)
        self.load_sampler(key, target)

    def _tenant(self, model_id: str) -> Tenant:
        if (found := self._tenants.get(model_id)) is None:
            raise DataError(f"the training client {model_id} is closed; create a new client from its last checkpoint")
        return found

    # --- sampling ---

    def submit(self, request: SampleRequest, source: CheckpointPath | None, key: str | None) -> None:
        """Let one rank answer a request with the adapter that it names `key`, loaded from `source` if need be.

        Raises DataError for what cannot be answered, and what `load_sampler` raises.
        """
        if key is not None and source is not None:
            if key not in self._samplers:
                self.load_sampler(key, source)
            self._samplers.move_to_end(key)
        params = replace(request.params, adapter=key)
        self._engine.check_request(GenerationRequest(request.id, request.prompt_ids, params))
        self._running[request.id] = key
        self._num_requests += 1
        if self._num_requests % self._world.world_peers.size != self._world.world_peers.rank:
            return
        self._own[request.id] = PendingSample(request, key, [[] for _ in range(request.count)])
        for number in range(request.count):
            seeded = replace(params, seed=derive_seed(params.seed, "sample", number))
            self._engine.submit(GenerationRequest(f"{request.id}#{number}", request.prompt_ids, seeded))

    def drop_samples(self) -> None:
        """Give up every request and free what it has on the device, as after an error there."""
        self._engine.close()
        self._own.clear()
        self._running.clear()
        self._dropped.clear()

    def load_sampler(self, key: str, source: CheckpointPath) -> None:
        """Put a checkpoint's adapter on the device under the name `key`, in place of one that has this name.

        The digest of what arrived must be that of the training client's weights. Raises DataError, CheckpointError.
        """
        record, adapter, _ = run_on_rank0(self._world.world_peers, partial(self._store.read, source, optimizer=False))
        if key not in self._samplers:
            self._make_room()
            self._add_sampler(key, source)
        self._engine.leave_generation_mode()  # it keeps bfloat16 copies of the old weights
        own = self._adapter_parameters(self._samplers[key])
        load_parameters(own, {f"param/{name}": value for name, value in adapter.items()})
        if (found := weights_digest(own)) != record.digest:
            self._remove_sampler(key)
            raise DataError(f"{source}: the sampler's weights are {found}, not {record.digest}; save them again")

    def remove_samplers(self, keys: Sequence[str]) -> None:
        """Free the memory of samplers; one with unanswered requests stays until its room is needed."""
        for key in keys:
            if key in self._samplers and key not in self._running.values():
                self._remove_sampler(key)

    def advance(self, tokens: int) -> dict[str, SampleResult | str]:
        """Score waiting prompts and make up to `tokens` steps of this rank's engine.

        Returns the requests of all ranks that are complete, and of those that failed the reason.
        """
        self._engine.enter_generation_mode()
        done: dict[str, SampleResult | str] = {}
        for id, pending in self._own.items():
            if (count := pending.request.prompt_logprobs) is not None and pending.scores is None:
                try:
                    pending.scores = self._engine.score(pending.request.prompt_ids, count, pending.key)
                except (DataError, TrainingDiverged) as error:
                    done[id] = str(error)
        for _ in range(tokens):
            for event in self._engine.step():
                id, _, place = event.request_id.rpartition("#")
                self._own[id].answers[int(place)].append(event)
        failed = dict.fromkeys(self._engine.pop_failed(), "logits are not finite")
        failed |= dict.fromkeys(self._dropped, "newest weights did not arrive")
        self._dropped.clear()
        for name, why in failed.items():
            done[name.rpartition("#")[0]] = f"the sampler's {why}; sample from an earlier checkpoint"
        done |= {id: found for id, one in self._own.items() if id not in done and (found := one.result()) is not None}
        for id in done:
            for index in range(self._own.pop(id).request.count):
                self._engine.cancel(f"{id}#{index}")
        gathered = {id: found for own in self._world.world_peers.all_gather(done) for id, found in own.items()}
        for id in gathered:
            del self._running[id]
        return gathered

    def _new_name(self) -> str:
        self._num_adapters += 1
        return f"adapter{self._num_adapters}"

    def _add_sampler(self, key: str, source: CheckpointPath) -> None:
        import peft

        self._engine.leave_generation_mode()
        read = partial(peft.PeftConfig.from_pretrained, str(self._store.path(source)))
        settings: Any = run_on_rank0(self._world.world_peers, read)
        name = self._new_name()
        with torch.random.fork_rng(devices=[]):
            self._model.add_adapter(name, settings)
        self._engine.add_adapter(key, name)
        self._samplers[key] = name

    def _make_room(self) -> None:
        """Remove the sampler that was used longest ago, where there are too many and it has nothing to do."""
        for key in list(self._samplers):
            if len(self._samplers) < self._spec.tinker.max_samplers:
                return
            if key not in self._running.values():
                self._remove_sampler(key)

    def _remove_sampler(self, key: str) -> None:
        self._dropped += self._engine.remove_adapter(key)
        self._model.remove_adapter(self._samplers.pop(key))

    def _adapter_parameters(self, peft_name: str) -> dict[str, torch.nn.Parameter]:
        """An adapter's parameters by their names in a PEFT folder."""
        named = self._model.module.named_parameters()
        return {name.replace(f".{peft_name}.", "."): p for name, p in named if f".{peft_name}." in name}
