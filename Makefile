SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# So that tests and scripts find stepwire and buf.
export PATH := $(CURDIR)/$(BIN):$(PATH)
LOCK := $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options $(UPGRADE)
BENCHES := $(filter-out __init__ report,$(basename $(notdir $(wildcard benchmarks/*.py))))
# Arguments for pytest, such as TESTS="tests/unit/loader -x".
TESTS ?=
# In two processes: a test keeps one core busy, and a server that starts does. Large counts on whole servers have all
# cores, so that none takes longer than a test may.
IN_PROCESS := tests/unit tests/property tests/contract
define pytest
set -x; $(if $(TESTS),$(BIN)/python -m pytest -q $(1) $(TESTS),\
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(1) -n 2 --dist worksteal $(IN_PROCESS); \
	$(BIN)/python -m pytest -q $(1) $(2) $(addprefix --ignore=,$(IN_PROCESS)))
endef

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stepwire needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.locked: requirements/lock.txt $(VENV)/.python
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements/lock.txt
	@touch $@

$(VENV)/.torch: requirements/torch.txt $(VENV)/.locked
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/torch.txt
	@touch $@

$(VENV)/.project: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	@touch $@

.PHONY: setup
setup: $(VENV)/.project ## make .venv with everything locked, compile the kernels, and fetch the demo model
	@$(BIN)/python -m worker_service.kernels.build >/dev/null
	@$(BIN)/python scripts/fetch_demo_model.py

.PHONY: demo
demo: setup ## serve the demo model, ask it a question, show the trace
	@$(BIN)/python scripts/demo.py

.PHONY: test
test: setup ## the tests
	@scripts/test_tools.sh report
	@$(call pytest,-m "not full",-n 2 --dist loadfile)

.PHONY: test-full
test-full: setup ## the tests with large counts and outside tools, which it installs
	@scripts/test_tools.sh install
	@export STEPWIRE_TEST_FULL=1; $(call pytest,)

.PHONY: lint
lint: $(VENV)/.project ## format, style, types, import directions, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/gen_dashboards.py --check

.PHONY: protos
protos: $(VENV)/.project ## generate stepwire/v1 from protos/
	$(BIN)/buf format --write
	$(BIN)/python scripts/gen_protos.py

.PHONY: bench
bench: setup ## run the benchmarks; BENCH=ready for one
	@for name in $(or $(BENCH),$(BENCHES)); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

.PHONY: peers
peers: setup ## build the engines to compare with, and write the models (heavy)
	scripts/make_peers.sh
	@$(BIN)/python -m benchmarks.peers.models

.PHONY: gpu-wheels
gpu-wheels: ## fetch what gpu-check needs beside torch, for a machine without a network (Python 3.12, x86-64)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--abi cp312 --abi abi3 --abi none $(patsubst %,--platform manylinux%_x86_64,_2_34 _2_31 _2_28 _2_17 2014) \
		--platform any -d .wheels \
		$$(sed -nE 's/^((structlog|llguidance|tokenizers|rich|attrs)==[^ ;\\]+).*/\1/p' requirements/lock.txt)

.PHONY: gpu-check
gpu-check: ## hold the CUDA paths against their references and measure them; a dry run where there is no device
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check.py

.PHONY: lock
lock: $(VENV)/.python ## write requirements/ anew; UPGRADE=--upgrade for the newest versions
	@[[ -x $(BIN)/pip-compile ]] || $(BIN)/python -m pip install -qq pip-tools
	$(LOCK) --annotation-style=line --extra dev -o requirements/lock.txt pyproject.toml requirements/torch.in
	$(LOCK) --no-annotate -c requirements/lock.txt -o requirements/runtime.txt pyproject.toml requirements/torch.in
	$(LOCK) --annotation-style=line -c requirements/lock.txt -o requirements/ray.txt requirements/ray.in

.PHONY: clean
clean: ## remove everything that was built here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tests/node/node_modules
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
