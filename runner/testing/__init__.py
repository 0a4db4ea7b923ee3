"""Conformance tests for plug-ins: one function per kind of component; it fails on a broken contract.

Each is called in a test with a config of the component's own class, and raises AssertionError with what is wrong:

    def test_reward() -> None:
        check_reward(FuzzyConfig(), {"forty-two": 1.0, "": 0.0}, columns={"answer": "forty-two"})

The components of this project pass the same checks. Everything runs on the CPU, in this process.
"""

from runner.testing.components import build_tiny_model as build_tiny_model
from runner.testing.components import check_callback as check_callback
from runner.testing.components import check_config as check_config
from runner.testing.components import check_tracker as check_tracker
from runner.testing.learning import check_adapter as check_adapter
from runner.testing.learning import check_algorithm as check_algorithm
from runner.testing.learning import check_optimizer as check_optimizer
from runner.testing.learning import check_schedule as check_schedule
from runner.testing.losses import check_loss as check_loss
from runner.testing.rollouts import check_data as check_data
from runner.testing.rollouts import check_environment as check_environment
from runner.testing.rollouts import check_reward as check_reward
from runner.testing.rollouts import check_sampler as check_sampler
from runner.testing.rollouts import completion as completion
