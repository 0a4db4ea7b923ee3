"""What a plug-in may import beside `runner.spec` and `runner.testing`: what a component's factory gets and gives.

Protocols and records that packages know one another by, one module per subject, and the few helpers that components
share. `runner.interfaces.losses` has the decorators of losses. Every other module of `runner` is private.

Each name is imported when it is first used: only some of them need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.core.imports import lazy_exports

if TYPE_CHECKING:
    from runner.algorithm.parts import LearnsFromData as LearnsFromData
    from runner.algorithm.parts import Parts as Parts
    from runner.core.batch import Batch as Batch
    from runner.core.batch import pack as pack
    from runner.core.errors import DataError as DataError
    from runner.core.errors import EnvironmentProblem as EnvironmentProblem
    from runner.core.errors import Problem as Problem
    from runner.core.errors import RunnerError as RunnerError
    from runner.core.errors import SpecError as SpecError
    from runner.core.metrics import Metrics as Metrics
    from runner.core.rng import derive as derive
    from runner.interfaces.data import Data as Data
    from runner.interfaces.data import Item as Item
    from runner.interfaces.data import Judged as Judged
    from runner.interfaces.data import Pair as Pair
    from runner.interfaces.data import Prompt as Prompt
    from runner.interfaces.data import Question as Question
    from runner.interfaces.device import Decide as Decide
    from runner.interfaces.device import DenseAttention as DenseAttention
    from runner.interfaces.device import Device as Device
    from runner.interfaces.device import VarlenAttention as VarlenAttention
    from runner.interfaces.learning import LOGPROBS as LOGPROBS
    from runner.interfaces.learning import Algorithm as Algorithm
    from runner.interfaces.learning import Callback as Callback
    from runner.interfaces.learning import Experience as Experience
    from runner.interfaces.learning import Gradients as Gradients
    from runner.interfaces.learning import Learner as Learner
    from runner.interfaces.learning import LinearLossFn as LinearLossFn
    from runner.interfaces.learning import LogitsLossFn as LogitsLossFn
    from runner.interfaces.learning import Loss as Loss
    from runner.interfaces.learning import LossFn as LossFn
    from runner.interfaces.learning import Model as Model
    from runner.interfaces.learning import Outputs as Outputs
    from runner.interfaces.learning import Peers as Peers
    from runner.interfaces.learning import Role as Role
    from runner.interfaces.learning import Sample as Sample
    from runner.interfaces.learning import Stage as Stage
    from runner.interfaces.learning import State as State
    from runner.interfaces.learning import StepEnd as StepEnd
    from runner.interfaces.learning import Terms as Terms
    from runner.interfaces.learning import Tracker as Tracker
    from runner.interfaces.learning import Turn as Turn
    from runner.interfaces.model import ContextParallelStyle as ContextParallelStyle
    from runner.interfaces.model import GenerativeModel as GenerativeModel
    from runner.interfaces.model import GreedyAnswerer as GreedyAnswerer
    from runner.interfaces.model import PublishedPart as PublishedPart
    from runner.interfaces.model import ScoringModel as ScoringModel
    from runner.interfaces.model import TrainableModel as TrainableModel
    from runner.interfaces.model import Writes as Writes
    from runner.interfaces.model import generative as generative
    from runner.interfaces.sampling import Around as Around
    from runner.interfaces.sampling import Bounds as Bounds
    from runner.interfaces.sampling import Completion as Completion
    from runner.interfaces.sampling import Environment as Environment
    from runner.interfaces.sampling import Environments as Environments
    from runner.interfaces.sampling import Finish as Finish
    from runner.interfaces.sampling import Observation as Observation
    from runner.interfaces.sampling import Partners as Partners
    from runner.interfaces.sampling import Request as Request
    from runner.interfaces.sampling import Reward as Reward
    from runner.interfaces.sampling import Rollout as Rollout
    from runner.interfaces.sampling import Sampler as Sampler
    from runner.interfaces.sampling import Written as Written
    from runner.reward.scorer import Fault as Fault
    from runner.reward.scorer import Faults as Faults
    from runner.reward.scorer import Scored as Scored
    from runner.reward.scorer import Scorer as Scorer
    from runner.reward.scorer import Unscorable as Unscorable
    from runner.reward.scorer import column as column
    from runner.reward.scorer import each as each
    from runner.reward.scorer import unscored as unscored
    from runner.run_dir.folder import RunFolder as RunFolder
    from runner.run_dir.manifest import redacted as redacted
    from runner.spec.registry import resolve as resolve
    from runner.trainer.callbacks import NoOp as NoOp

lazy_exports(
    globals(),
    {
        "runner.algorithm.parts": "LearnsFromData Parts",
        "runner.core.batch": "Batch pack",
        "runner.core.errors": "DataError EnvironmentProblem Problem RunnerError SpecError",
        "runner.core.metrics": "Metrics",
        "runner.core.rng": "derive",
        "runner.interfaces.data": "Data Item Judged Pair Prompt Question",
        "runner.interfaces.device": "Decide DenseAttention Device VarlenAttention",
        "runner.interfaces.learning": "Algorithm Callback Experience Gradients LOGPROBS Learner LinearLossFn "
        "LogitsLossFn Loss LossFn Model Outputs Peers Role Sample Stage State StepEnd Terms Tracker Turn",
        "runner.interfaces.model": "ContextParallelStyle GenerativeModel GreedyAnswerer PublishedPart "
        "ScoringModel TrainableModel Writes generative",
        "runner.interfaces.sampling": "Around Bounds Completion Environment Environments Finish Observation "
        "Partners Request Reward Rollout Sampler Written",
        "runner.reward.scorer": "Fault Faults Scored Scorer Unscorable column each unscored",
        "runner.run_dir.folder": "RunFolder",
        "runner.run_dir.manifest": "redacted",
        "runner.spec.registry": "resolve",
        "runner.trainer.callbacks": "NoOp",
    },
)
