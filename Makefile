# make demo     train the demonstration model        (ARGS="run.seed=1 mode=one_step_off" to change settings)
# make test     lint, types, layers and tests        (ARGS="tests/pipeline -x" to run some of the tests)
# make bench    benchmarks, into build/bench/        (ARGS=... is passed on)
# make bench-update   what updates of the weights cost, about 25 minutes   (ARGS="--models 1m --only broadcast")
# make study-staleness     what stale data costs, by loss, about half an hour        (ARGS="--quick" for two minutes)
# make format   rewrite the sources in the house style
# make clean    remove everything that is made here, .venv included

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed

# One thread per test process: tests run side by side, and thread pools of the same size on top only slow them down.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers pytest bench bench-update study-staleness format clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

# Where Debian's Python comes without ensurepip, the pip outside fills the environment.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headway needs Python 3.11 or later; name one with: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/headway train recipes/demo.yaml $(ARGS)

test: lint types layers pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

pytest: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

bench-update: setup
	$(BIN)/python -m benchmarks.update $(ARGS)

study-staleness: setup
	$(BIN)/python -m benchmarks.study_staleness $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
