"""From a job spec to a job: the only package that knows both the configs and what they configure."""

from runner.build.components import build_device as build_device
from runner.build.components import build_model as build_model
from runner.build.components import build_store as build_store
from runner.build.components import build_tokenizer as build_tokenizer
from runner.build.job import BuiltJob as BuiltJob
from runner.build.job import OutputSinks as OutputSinks
from runner.build.job import build as build
from runner.build.job import refuse_different_steps as refuse_different_steps
