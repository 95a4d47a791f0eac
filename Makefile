# The commands of this repository. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-integration check bench bench-learning bench-long-episodes clean

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
# Shell scripts that git knows or would add, so that a new one is checked before it is committed.
SHELL_SCRIPTS = $(sort $(shell git ls-files -co --exclude-standard -- '*.sh') .ci/run cpu/setup.sh)

# make demo SEED=2        another seed
# make demo RESUME=1      go on where the last run was stopped
# make demo DEMO_ARGS=... any option of `python -m cpu.demo --help`
SEED ?=
RESUME ?=
DEMO_ARGS ?=

help: ## List the commands.
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 28

setup: ## Make both environments and find or install a Chromium (the other commands do what they need of it).
	@cpu/setup.sh all

demo: ## Train a browsing policy on this machine's CPU; SEED=n, RESUME=1, DEMO_ARGS='...'.
	@cpu/setup.sh all
	@exec $(PYTHON) -m cpu.demo $(if $(SEED),--seed $(SEED)) $(if $(filter 1,$(RESUME)),--resume) $(DEMO_ARGS)

test: ## Run the offline tests: no GPU, no browser, no server.
	@cpu/setup.sh test
	@HF_HUB_OFFLINE=1 $(PYTEST) tests/unit

test-integration: ## Run the tests against the real server, Chromium, verl's trainer and Slurm (needs root).
	@cpu/setup.sh all
	@tests/slurm/setup.sh
	@HF_HUB_OFFLINE=1 $(PYTEST) --durations=25 $(wildcard tests/contract tests/training tests/slurm)

check: ## Lint and format-check Python and shell.
	@cpu/setup.sh test
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@for script in $(SHELL_SCRIPTS); do bash -n "$$script"; done
	@.venv/bin/shellcheck $(SHELL_SCRIPTS)

bench: ## Run every benchmark.
	@cpu/setup.sh all
	@for benchmark in $(wildcard benchmarks/*.py); do echo "== $$benchmark"; $(PYTHON) "$$benchmark"; done

# A night on 2 cores; a run that has its result is not run again. SWEEP_ARGS='--seeds 0' for a part of it.
SWEEP_ARGS ?=
bench-learning: ## Train while rollouts are broken on purpose, and draw the curves (hours; goes on where it was stopped).
	@cpu/setup.sh all
	@$(PYTHON) benchmarks/learning/sweep.py $(SWEEP_ARGS)
	@$(PYTHON) benchmarks/learning/plot.py

# LONG_EPISODES_ARGS='--seeds 0 --policies window' for a part of it.
LONG_EPISODES_ARGS ?=
bench-long-episodes: ## Train on episodes that do not fit one context, and draw the curves (hours; goes on where it was stopped).
	@cpu/setup.sh all
	@$(PYTHON) benchmarks/long_episodes/train.py $(LONG_EPISODES_ARGS)
	@$(PYTHON) benchmarks/long_episodes/plot.py

clean: ## Remove caches; with ALL=1 the environments and what runs have written as well.
	@find . -name __pycache__ -not -path './.venv*' -type d -prune -exec rm -rf {} +
	@rm -rf .pytest_cache .ruff_cache .hypothesis $(if $(filter 1,$(ALL)),.venv .venv-gym .setup.lock runs outputs)
