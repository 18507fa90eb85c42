# Everything runs in .venv, made from one of the two locks the first time and left alone while nothing changes.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# The lock to install: gpu where a CUDA device answers, else cpu. STAGECOACH_LOCK=gpu|cpu decides otherwise.
STAGECOACH_LOCK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
ENVIRONMENTS := $(patsubst %/pyproject.toml,%,$(wildcard examples/*/pyproject.toml))
SOURCES := requirements/$(STAGECOACH_LOCK).txt pyproject.toml $(wildcard examples/*/pyproject.toml)
STAMP := .venv/installed-$(STAGECOACH_LOCK)-$(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)

# Idle OpenMP threads that spin starve everything else on a small machine.
RUN := OMP_WAIT_POLICY=PASSIVE .venv/bin/
# Two files of tests at once: more would start more engines than a small machine has cores for. Files that share an engine
# are one to tests/conftest.py, which hands them out.
SIDE_BY_SIDE := -n 2 --dist loadfile

.PHONY: help install demo test test-pure test-all test-other test-browser pictures test-cuda-wheels mutate faults sabotage soak check docs format bench lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## install the lock and this checkout into .venv; does nothing when that is done

$(STAMP):
	@requirements/install.sh $(STAGECOACH_LOCK) $(STAMP) $(ENVIRONMENTS)

demo: $(STAMP) ## train a small model from nothing to good, in a few minutes on two cores
	@$(RUN)stagecoach demo $(ARGS)

test: test-pure ## the pure tests, and of each capability one with a real engine, learner, Prefect and viewer
	@$(RUN)python -m pytest -q $(SIDE_BY_SIDE) -m "essential" --ignore=tests/docs $(ARGS)

test-pure: $(STAMP) ## the tests that need no engine, in three minutes
	@$(RUN)python -m pytest -q $(SIDE_BY_SIDE) -m "not engine and not browser" --ignore=tests/docs $(ARGS)

# LESS="and not nightly" leaves out what CI has no time for.
test-all: test ## all tests but those in a browser: those of `test`, then the rest; for a GPU where there is one
	@$(RUN)python -m pytest -q $(SIDE_BY_SIDE) -m "engine and not essential $(LESS)" --ignore=tests/docs $(ARGS)

# `sum` rounds otherwise and JSON may have more levels from one Python to the next.
OTHER ?= $(shell for each in python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python3.13; do \
	"$$each" -c '' 2>/dev/null && echo "$$each" && break; done)
test-other: ## the pure tests with Python 3.13, or OTHER=path/to/python, in a clone of the last commit
	@[ -n "$(OTHER)" ] || { echo "NOT RUN: there is no Python 3.13 here, and OTHER names none"; exit 0; }; \
		set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; git clone -q . "$$folder/stagecoach"; \
		$(MAKE) -C "$$folder/stagecoach" test-pure PYTHON="$(OTHER)"

test-browser: $(STAMP) ## the viewer and Prefect's pages in a real Chromium, which is installed where it is missing
	@command -v chromium >/dev/null || { export DEBIAN_FRONTEND=noninteractive; apt-get -o Acquire::Retries=5 update -qq && \
		apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=120 install -qq -y chromium; }
	@.venv/bin/python -c 'import axe_playwright_python' 2>/dev/null || \
		.venv/bin/python -m pip install --disable-pip-version-check --retries 10 -q playwright==1.65.2 axe-playwright-python==0.1.8
	@$(RUN)python -m pytest -q $(SIDE_BY_SIDE) -m browser tests/browser $(ARGS)

pictures: $(STAMP) ## pictures and recordings of docs/images, from real runs that take half an hour; ARGS="tour tools" for some
	@.venv/bin/python -c 'import playwright, pyte' 2>/dev/null || \
		.venv/bin/python -m pip install --disable-pip-version-check --retries 10 -q playwright==1.65.2 pyte==0.8.2
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN)python -m tests.browser.pictures $(ARGS)

CUDA := .venv-cuda
CUDA_STAMP := $(CUDA)/installed-$(shell cat requirements/gpu.txt pyproject.toml | cksum | cut -d ' ' -f 1)
# The same tests of the learner's attention and determinism hold in both builds of torch.
ON_BOTH := tests/tasks/learner/test_attention.py tests/tasks/learner/test_trainer.py
test-cuda-wheels: $(CUDA_STAMP) ## the GPU lock on a machine without a GPU: 10 GB, for a nightly and before the lock changes
	@OMP_WAIT_POLICY=PASSIVE $(CUDA)/bin/python -m pytest -q -m cuda_wheels tests/cuda_wheels $(ARGS)
	@OMP_WAIT_POLICY=PASSIVE $(CUDA)/bin/python -m pytest -q -m engine $(ON_BOTH) $(ARGS)
	@$(RUN)python -m pytest -q -m cuda_wheels tests/tasks/inference/engine/test_second_runner.py $(ARGS)

$(CUDA_STAMP): | $(STAMP)
	@[ -x $(CUDA)/bin/python ] || .venv/bin/python -m venv $(CUDA)
	@rm -f $(CUDA)/installed-*
	@$(CUDA)/bin/python requirements/install.py gpu $@
	@touch $@

mutate: $(STAMP) ## mutants of the modules that credit, mask, pack and weigh; the report is build/mutation.md
	@.venv/bin/python -m pip install --disable-pip-version-check -q mutmut==3.8.1
	@$(RUN)python -m tests.mutation.mutate $(ARGS)

faults: $(STAMP) ## every test that plants a fault; the table of what came out is build/faults.md
	@$(RUN)python -m pytest -q $(SIDE_BY_SIDE) -m fault --fault-table=build/faults.md $(ARGS)

sabotage: $(STAMP) ## faults of the program itself, one by one, and which test of faults catches each
	@$(RUN)python -m tests.faults.sabotage $(ARGS)

MINUTES ?= 10
soak: $(STAMP) ## a run and the commands beside it, killed at random for MINUTES; ARGS=--real kills an engine as well
	@$(RUN)python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

check: $(STAMP) ## format, lint, types, import rules, and the commands in the docs
	@$(RUN)ruff format --check .
	@$(RUN)ruff check .
	@$(RUN)mypy
	@$(RUN)lint-imports
	@$(RUN)python -m pytest -q tests/docs

docs: $(STAMP) ## the pages of docs/ as a site in site/, with a reference made from the code; links are checked
	@.venv/bin/python -c 'import material' 2>/dev/null || \
		.venv/bin/python -m pip install --disable-pip-version-check --retries 10 -q mkdocs-material==9.8.1 mkdocs==1.6.1
	@NO_MKDOCS_2_WARNING=1 $(RUN)python -m mkdocs build --clean $(ARGS)

format: $(STAMP) ## format the code and mend what the linter can
	@$(RUN)ruff format .
	@$(RUN)ruff check --fix .

bench: $(STAMP) ## the benchmarks; figures go to benchmarks/
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(RUN)python -m benchmarks.$$(basename $$file .py); done

lock: $(STAMP) ## make both locks from pyproject.toml; ARGS=--upgrade takes the newest versions
	@.venv/bin/python -c 'import uv' 2>/dev/null || .venv/bin/python -m pip install --quiet uv
	@.venv/bin/python requirements/lock.py $(ARGS)
	@wc -l requirements/*.txt

clean: ## remove the environment and caches; stores of runs stay
	rm -rf .venv .venv-cuda build site *.egg-info examples/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
		.hypothesis
