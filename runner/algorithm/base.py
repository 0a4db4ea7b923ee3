"""The options that all algorithms share, and the properties that every algorithm declares."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from runner.algorithm import loss_registry
from runner.spec.base import ITEM_COLUMNS, ComponentConfig, Dtype, Head, ItemKind, absolute_if_local

OldLogprobsSource = Literal["itself", "sampler", "trainer"]


class FrozenModelSpec(NamedTuple):
    """A frozen model that a config requests.

    mode: adapter = the model with its adapter disabled, copy = a frozen copy of the initial weights, cached = the
        log-probabilities of either, computed before the first step; None = adapter where there is one, else copy
    path: another model, by folder or hub id, instead of either; option: the option that names it
    revision: of the hub; dtype: of its weights, None = that of the matrix products
    """

    mode: Literal["adapter", "copy", "cached"] | None = None
    path: str | None = None
    revision: str | None = None
    dtype: Dtype | None = None
    option: str | None = None


DEFAULT_MICRO_BATCH = 4096  # tokens


class AlgorithmConfig(ComponentConfig):
    """How a step learns, and the one batch vocabulary."""

    group: ClassVar[str] = "algorithm"
    scores_within_passes: ClassVar[bool] = False  # a frozen model is run between the learner's own passes
    item_kind: ClassVar[ItemKind] = "sft"  # what it learns from
    loss_on_prompt: ClassVar[bool] = False  # every token of an item, and not its answers only
    serves: ClassVar[bool] = False  # whether clients of a server, and not the loop, make its steps
    needs_sampler: ClassVar[bool] = False  # whether it needs a sampler
    needs_reward: ClassVar[bool] = False  # whether it needs a reward
    explain_fn: ClassVar[str | None] = None  # "module:function" of (config, job) → the lines of `run explain loss`
    batch_size: int = Field(default=32, ge=1, description="Examples (pairs, prompts) per step, over all ranks.")
    mini_batches: int = Field(
        default=1,
        ge=1,
        description="Parts of a step's batch, each one optimizer update; dropped groups may leave fewer.",
    )
    micro_batch_tokens: int | None = Field(
        default=DEFAULT_MICRO_BATCH,
        ge=1,
        description="Maximum tokens of a micro-batch on each device, patches of images included; changes memory and "
        "speed, and of the update only dropout. null = as many as fit the device by the estimate of run plan; 4096 on "
        "a CPU.",
    )

    @property
    def micro_batch_budget(self) -> int:
        """`micro_batch_tokens`, or what stands for null where no device is known."""
        return self.micro_batch_tokens or DEFAULT_MICRO_BATCH

    @property
    def has_plug_in_loss(self) -> bool:
        """Whether a registered loss of a plug-in is chosen, which may add metrics to policy/."""
        known, chosen = loss_registry.plug_ins(), loss_registry.choices(type(self))
        return any(getattr(self, name) in known[kind] for name, kind in chosen.items())

    @property
    def samples_per_prompt(self) -> int:
        """Answers to each prompt of a step."""
        return 1

    @classmethod
    def with_plugin_options(cls) -> type[Self]:
        return loss_registry.with_options(cls, loss_registry.functions)

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out null options of plug-ins, so that a run resumes where other plug-ins are installed."""
        data: dict[str, Any] = handler(self)
        unset = {name for name in loss_registry.plug_in_options(type(self)) if data.get(name) is None}
        return {name: value for name, value in data.items() if name not in unset}

    def uses_margin(self) -> bool:
        """Whether it uses the column `margin` of pairs."""
        return False

    def trained_models(self) -> dict[str, Head]:
        """The models that learn, by role; the first one is what a run makes."""
        return {"policy": "lm"}

    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The models that only score, by role: reference, teacher."""
        return {}

    def upstream_models(self) -> Mapping[str, str]:
        """Option → the model that it names, which may be a run, or recipe:NAME that is run first."""
        return {}

    def steps_ahead(self) -> int:
        """How far sampling runs ahead of training."""
        return 0

    @property
    def old_logprobs_source(self) -> OldLogprobsSource:
        """Whose log-probabilities are the denominator of the ratio; `itself` also without a ratio."""
        return "itself"

    def needs_sampler_logprobs(self) -> bool:
        """Whether it needs the log-probabilities that the sampler reported, and not only to compare them."""
        return False

    def suggest_instead(self, head: Head, objection: str) -> tuple[str, str]:
        """The option behind a head that the model cannot have, and what to type instead."""
        return "algorithm", f"{objection}; choose another model"

    def learning_rate(self, role: str, common: float) -> float:
        """The learning rate of a role; `common` is optimizer.lr."""
        return common

    def is_dropout_enabled(self) -> bool:
        """Whether the dropout of model and adapter is on where they learn."""
        return True

    def is_dropout_requested(self) -> bool:
        """Whether an option was set to have it on."""
        return False

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = [*self._component_problems(job), *loss_registry.unused_options(self)]
        if self.batch_size % self.mini_batches:
            text = f"{self.mini_batches} does not divide algorithm.batch_size={self.batch_size}"
            found.append(("algorithm.mini_batches", text))
        return found

    def _component_problems(self, job: Any) -> list[tuple[str, str]]:
        """A sampler and a reward where they are needed, and nowhere else."""
        what = {"sampler": "sampler=torch", "reward": "reward=exact, or reward=function reward.path=my_reward.py:score"}
        chosen = {group: getattr(job, group).name for group in ("sampler", "reward", "environment")}
        if self.needs_sampler:
            needed = ["sampler", "reward"] if self.needs_reward else ["sampler"]
            missing = [group for group in needed if chosen[group] == "none"]
            found = [(group, f"algorithm={self.name} needs one; type {what[group]}") for group in missing]
            if not self.needs_reward and chosen["reward"] != "none":
                found.append(("reward", f"algorithm={self.name} uses no reward; type reward=none"))
            return found
        learns = f"algorithm={self.name} trains on a data set ({ITEM_COLUMNS[self.item_kind]}) and does not sample"
        return [(group, f"{learns}; type {group}=none") for group, name in chosen.items() if name != "none"]


class ReferenceBasedConfig(AlgorithmConfig):
    """Compares the policy with log-probabilities computed without dropout, and so trains without it."""

    dropout: bool = Field(
        default=False,
        description="Keep dropout on in training; noisy, because reference log-probabilities are computed without it.",
    )
    models: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "reference": {"path": "reference_path", "revision": "reference_revision", "dtype": "reference_dtype"}
    }
    reference_path: str | None = Field(
        default=None,
        min_length=1,
        description="Reference model: a folder, a run, a hub id, or recipe:NAME (that recipe runs first); null = the "
        "initial weights of this job.",
    )
    reference_revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of reference_path on the hub or ModelScope; null = the default.",
    )
    reference_dtype: Dtype | None = Field(
        default=None, description="Data type of the reference model; null = model.dtype."
    )

    def upstream_models(self) -> Mapping[str, str]:
        own = {"reference_path": self.reference_path} if self.reference_path else {}
        return {**super().upstream_models(), **own}

    def with_absolute_paths(self) -> Self:
        path = self.reference_path and absolute_if_local(self.reference_path)
        return super().with_absolute_paths().model_copy(update={"reference_path": path})

    def reference_model(self, mode: Literal["adapter", "copy", "cached"] | None) -> FrozenModelSpec:
        """The reference: another model, or the initial weights of the job in this mode."""
        if self.reference_path is None:
            return FrozenModelSpec(mode)
        path, revision, dtype = self.reference_path, self.reference_revision, self.reference_dtype
        return FrozenModelSpec(path=path, revision=revision, dtype=dtype, option="reference_path")

    def reference_problems(self, mode: str | None, job: Any) -> list[tuple[str, str]]:
        """What is wrong with the options of the reference, which is requested in this mode."""
        if self.reference_path is None:
            text = "is used only with algorithm.reference_path; set that option too, or leave this one out"
            set_ = {"reference_revision": self.reference_revision, "reference_dtype": self.reference_dtype}
            found = [(f"algorithm.{name}", text) for name, value in set_.items() if value is not None]
        elif mode is not None:
            text = f"algorithm.reference={mode} uses the initial weights of this job; set only one of the two options"
            found = [("algorithm.reference_path", text)]
        elif "reference" not in self.frozen_models():
            found = [("algorithm.reference_path", f"this algorithm={self.name} has no reference model; leave it out")]
        else:
            found = []
        if mode == "adapter" and job.adapter.trains_base:
            text = "there is no adapter to disable; type adapter=lora, or algorithm.reference=copy"
            found.append(("algorithm.reference", text))
        return found

    def is_dropout_enabled(self) -> bool:
        return self.dropout

    def is_dropout_requested(self) -> bool:
        return self.dropout

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if not self.dropout and job.adapter.dropout_rate > 0:
            text = f"algorithm={self.name} trains without dropout; leave it out, or type algorithm.dropout=true"
            found.append(("adapter.dropout", text))
        return found


class TeacherBasedConfig(AlgorithmConfig):
    """What learns from a teacher: another model with the same tokenizer, which only scores."""

    models: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "teacher": {"path": "teacher", "revision": "teacher_revision", "dtype": "teacher_dtype"}
    }
    teacher: str = Field(
        min_length=1, description="Teacher model: a folder, a run, a hub id, or recipe:NAME (that recipe runs first)."
    )
    teacher_revision: str | None = Field(
        default=None, description="Branch, tag or commit of the teacher on the hub or ModelScope; null = the default."
    )
    teacher_dtype: Dtype | None = Field(default=None, description="Data type of the teacher; null = model.dtype.")

    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        teacher = FrozenModelSpec(
            path=self.teacher, revision=self.teacher_revision, dtype=self.teacher_dtype, option="teacher"
        )
        return {**super().frozen_models(), "teacher": teacher}

    def upstream_models(self) -> Mapping[str, str]:
        return {**super().upstream_models(), "teacher": self.teacher}

    def with_absolute_paths(self) -> Self:
        return super().with_absolute_paths().model_copy(update={"teacher": absolute_if_local(self.teacher)})
