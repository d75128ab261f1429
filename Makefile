# `make demo` sets everything up and runs the main job; `make test` sets everything up and runs the tests.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-more test-ci test-all mutants adversary docs site dist golden bench clean

BIN := .venv/bin
STAMP := .venv/.ready
# The first Python of a supported version that runs and can make an environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)
# An index with another build of PyTorch, such as the small one for CPUs: docs/how-to/install.md.
TORCH_INDEX ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## build .venv with the package and its tools (once)

$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; install one, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv .venv || { \
		$(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH_INDEX:%=--extra-index-url %) torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . -r requirements-dev.txt
	@touch $@

demo: setup ## run the main job: digits, four rotations, four methods, eight seeds
	$(BIN)/coterie run

check: setup ## lint, format, types, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python scripts/check_words.py

test: setup ## the tests that notice every listed fault: five minutes on two cores
	$(PYTEST) -m "not full and not slow and not gpu"

test-more: setup ## what `make test` leaves out and .ci/run still has time for
	$(PYTEST) -m "full and not slow and not gpu"

test-ci: setup ## `make test` and `make test-more` in one run, as .ci/run does
	$(PYTEST) -m "not slow and not gpu"

test-all: setup ## every test; those marked gpu skip where there is none
	$(PYTEST)

mutants: setup ## put faults into the code one at a time: do the tests notice? (about half an hour)
	$(BIN)/python scripts/mutants.py $(MUTANTS)

adversary: setup ## draw studies at random and check what must hold for all (MINUTES=10)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.adversary --minutes $(or $(MINUTES),10) $(ADVERSARY)

docs: setup ## write everything that is generated: pages, README's tables, the list of the command line
	$(BIN)/python scripts/design.py
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/api.py
	$(BIN)/python scripts/stored.py
	$(BIN)/python scripts/reproduction.py
	$(BIN)/python scripts/lineage.py
	$(BIN)/python scripts/hospitals.py
	$(BIN)/python scripts/personalized.py
	$(BIN)/python scripts/performance.py
	$(BIN)/python scripts/wire.py
	$(BIN)/python scripts/network.py
	$(BIN)/python scripts/reliability.py
	$(BIN)/python scripts/poisoning.py
	$(BIN)/python scripts/waiting.py
	$(BIN)/python scripts/peer_tables.py
	$(BIN)/python scripts/readme.py
	$(BIN)/python scripts/tasks.py

site: setup ## build the documentation into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: setup ## build dist/*.whl and dist/*.tar.gz, check them, try the wheel in a fresh environment
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/try_wheel.py dist

golden: setup ## store runs of tests/golden that are missing or have changed; a change needs a reason in the changelog
	COTERIE_GOLDEN=rewrite OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n0 tests/golden

bench: setup ## measure the engines on this machine
	$(BIN)/python -m benchmarks.engines --json runs/bench.json

clean: ## remove the environment and what tools left
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis
