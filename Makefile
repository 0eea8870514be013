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
READY := $(VENV)/.ready-$(MLX)
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header pyproject.toml --extra dev --extra vision

ifeq ($(LOCK),)
$(error MLX=$(MLX) is unknown: use MLX=cpu (default; on a Mac this is Metal) or MLX=cuda)
endif

.DEFAULT_GOAL := help
.PHONY: help setup serve test check soak bench eval-tiny lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## make .venv and install what the lock file names (MLX=cuda for NVIDIA)

serve: $(READY)  ## serve on http://127.0.0.1:8420 (ARGS="--port 9000 --home DIR")
	@exec $(BIN)/hearth serve $(ARGS)

# Compiling what it imports is half of what a process costs that tests; so that is kept.
test soak: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)  ## run the tests, JOBS=3 files at a time (TESTS="tests/unit -k name" for some)
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

check: $(READY)  ## linter, format, types, import borders, house gauges
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m ops.house.check

soak: $(READY)  ## run the long tests
	@$(BIN)/python -m pytest -q -m soak $(TESTS)

bench: $(READY)  ## measure (ops/bench/METHODOLOGY.md says what)
	@$(BIN)/python -m ops.bench $(ARGS)

# One server per core and one BLAS thread in each: more of them would only wait for one another.
eval-tiny: $(READY)  ## evaluate the embedded model
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m ops.tiny_model.evaluate $(ARGS)

lock: $(VENV)/.uv-$(UV_VERSION)  ## resolve the dependencies again (ARGS=--upgrade for newer ones)
	$(COMPILE) --extra cpu --output-file $(LOCK_cpu) $(ARGS) > /dev/null
	$(COMPILE) --extra cuda --output-file $(LOCK_cuda) $(ARGS) > /dev/null

clean:  ## remove .venv and all caches; models and HEARTH_HOME stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +

$(VENV)/.uv-$(UV_VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Hearth needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, as in make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

# The lock names the build tool as well, so that nothing is fetched that it does not hash.
$(READY): $(VENV)/.uv-$(UV_VERSION) $(LOCK) pyproject.toml
	@rm -f $(VENV)/.ready-*
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
