"""What a plug-in imports beside `runner.spec` and `runner.testing`: types and helpers of components.

Protocols and records that packages know one another by, one module per subject, and the few helpers that components
share. `runner.interfaces.losses` has the decorators of losses. Every other module of `runner` is private.

Each name is imported when it is first used: only some of them need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.core.package import lazy_exports

if TYPE_CHECKING:
    from runner.core.batch import Batch as Batch
    from runner.core.batch import pack as pack
    from runner.core.errors import DataError as DataError
    from runner.core.errors import EnvironmentProblem as EnvironmentProblem
    from runner.core.errors import Problem as Problem
    from runner.core.errors import RunnerError as RunnerError
    from runner.core.errors import SpecError as SpecError
    from runner.core.metrics import Metrics as Metrics
    from runner.core.rng import derive_seed as derive_seed
    from runner.interfaces.environments import Environment as Environment
    from runner.interfaces.environments import EnvironmentFactory as EnvironmentFactory
    from runner.interfaces.environments import EnvironmentReply as EnvironmentReply
    from runner.interfaces.environments import Environments as Environments
    from runner.interfaces.environments import EpisodeBatch as EpisodeBatch
    from runner.interfaces.environments import ExtendConversation as ExtendConversation
    from runner.interfaces.environments import Observation as Observation
    from runner.interfaces.examples import TokenizedAnswers as TokenizedAnswers
    from runner.interfaces.examples import TokenizedExamples as TokenizedExamples
    from runner.interfaces.learning import LOGPROBS as LOGPROBS
    from runner.interfaces.learning import Algorithm as Algorithm
    from runner.interfaces.learning import AlgorithmInputs as AlgorithmInputs
    from runner.interfaces.learning import BaseCallback as BaseCallback
    from runner.interfaces.learning import Callback as Callback
    from runner.interfaces.learning import Experience as Experience
    from runner.interfaces.learning import GradientReducer as GradientReducer
    from runner.interfaces.learning import Learner as Learner
    from runner.interfaces.learning import LinearLossFn as LinearLossFn
    from runner.interfaces.learning import LogitsLossFn as LogitsLossFn
    from runner.interfaces.learning import LogitTermsFn as LogitTermsFn
    from runner.interfaces.learning import Loss as Loss
    from runner.interfaces.learning import LossFn as LossFn
    from runner.interfaces.learning import Model as Model
    from runner.interfaces.learning import OfflineAlgorithm as OfflineAlgorithm
    from runner.interfaces.learning import Outputs as Outputs
    from runner.interfaces.learning import PipelineOp as PipelineOp
    from runner.interfaces.learning import PipelineStage as PipelineStage
    from runner.interfaces.learning import RankCollectives as RankCollectives
    from runner.interfaces.learning import Role as Role
    from runner.interfaces.learning import Sample as Sample
    from runner.interfaces.learning import State as State
    from runner.interfaces.learning import StepResult as StepResult
    from runner.interfaces.learning import Tracker as Tracker
    from runner.interfaces.model import BatchDecoder as BatchDecoder
    from runner.interfaces.model import ContextParallelStyle as ContextParallelStyle
    from runner.interfaces.model import Decide as Decide
    from runner.interfaces.model import DenseAttention as DenseAttention
    from runner.interfaces.model import Device as Device
    from runner.interfaces.model import GenerativeModel as GenerativeModel
    from runner.interfaces.model import ScoringModel as ScoringModel
    from runner.interfaces.model import SequenceLengths as SequenceLengths
    from runner.interfaces.model import TrainableModel as TrainableModel
    from runner.interfaces.model import VarlenAttention as VarlenAttention
    from runner.interfaces.model import WeightSubset as WeightSubset
    from runner.interfaces.model import as_generative as as_generative
    from runner.interfaces.rewards import GroupScorer as GroupScorer
    from runner.interfaces.rewards import GroupScores as GroupScores
    from runner.interfaces.rewards import ScoringFailure as ScoringFailure
    from runner.interfaces.rewards import ScoringFailures as ScoringFailures
    from runner.interfaces.rewards import UnscorableError as UnscorableError
    from runner.interfaces.rewards import require_column as require_column
    from runner.interfaces.rewards import score_each as score_each
    from runner.interfaces.rewards import unscored_group as unscored_group
    from runner.interfaces.sampling import Completion as Completion
    from runner.interfaces.sampling import Data as Data
    from runner.interfaces.sampling import EpisodeResult as EpisodeResult
    from runner.interfaces.sampling import EvalQuestion as EvalQuestion
    from runner.interfaces.sampling import LabeledCompletion as LabeledCompletion
    from runner.interfaces.sampling import ModelLimits as ModelLimits
    from runner.interfaces.sampling import PreferencePair as PreferencePair
    from runner.interfaces.sampling import Prompt as Prompt
    from runner.interfaces.sampling import Request as Request
    from runner.interfaces.sampling import Reward as Reward
    from runner.interfaces.sampling import Rollout as Rollout
    from runner.interfaces.sampling import Sampler as Sampler
    from runner.interfaces.sampling import SamplerWrapper as SamplerWrapper
    from runner.interfaces.sampling import TokenizedExample as TokenizedExample
    from runner.run_dir.folder import RunFolder as RunFolder
    from runner.run_dir.manifest import redact_values as redact_values
    from runner.spec.registry import resolve as resolve

lazy_exports(globals())
