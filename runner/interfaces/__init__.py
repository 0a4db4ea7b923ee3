"""What packages know of one another: Protocols and records, one module per subject. A plug-in may import all of it.

Names are imported when they are first used: only some of them need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "data": ("Data", "Item", "Judged", "Pair", "Prompt", "Question"),
    "device": ("Decide", "DenseAttention", "Device", "VarlenAttention"),
    "learning": (
        "Algorithm",
        "Callback",
        "Experience",
        "Gradients",
        "LOGPROBS",
        "Learner",
        "LinearLossFn",
        "LogitsLossFn",
        "Loss",
        "LossFn",
        "Model",
        "Outputs",
        "Peers",
        "Role",
        "Sample",
        "Stage",
        "State",
        "StepEnd",
        "Terms",
        "Tracker",
        "Turn",
    ),
    "sampling": (
        "Around",
        "Bounds",
        "Completion",
        "Environment",
        "Environments",
        "Finish",
        "Observation",
        "Partners",
        "Request",
        "Reward",
        "Rollout",
        "Sampler",
        "Written",
    ),
    "model": (
        "ContextParallelStyle",
        "GenerativeModel",
        "GreedyAnswerer",
        "PublishedPart",
        "ScoringModel",
        "TrainableModel",
        "Writes",
        "generative",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
