# One target each for what people do here; CI (.ci/run) calls the same ones.
#
#   make train                        a tiny model on this machine, in runs/tiny-<time>
#   make test  TESTARGS="-k pool"     the tests
#   make check                        ruff and mypy
#   make test-torch TORCH=2.15.0      the engine's tests with another torch, in .venv-torch-2.15.0
#   make families                     docs/families.md anew: every family of transformers with fp32 tensors
#   make bench BENCH=sharding         a benchmark's page in docs/benchmarks anew; all of them without BENCH
#   make clean                        removes caches and builds; keeps .venv and runs/
#
# The first call builds .venv from constraints.txt, and again when a pin, pyproject.toml or the Python version changes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TESTARGS ?=
BENCH ?= sharding attention loss planner loading

BIN := $(VENV)/bin
PINS := $(shell { $(PYTHON) --version; cat pyproject.toml constraints.txt; } | cksum | tr ' ' '-')
INSTALLED := $(VENV)/.installed-$(PINS)

# What stands on torch's internals: the engine, and both models whole. Not the trainer, planner, report or integrations.
ENGINE_TESTS := test_torch_private test_doctor test_fsdp_api test_collectives test_lost_islands test_compile \
	test_optimizer_and_checkpoint test_families test_parity
TORCH_VENV := .venv-torch-$(TORCH)

.PHONY: train test test-torch check families bench clean

train: $(INSTALLED)
	$(BIN)/dsv4-fsdp train --run-dir runs/tiny-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TESTARGS)

# Apart from .venv: the pins without torch and what only torch needs, since each torch asks for its own of these.
test-torch:
	$(if $(TORCH),,$(error say which: make test-torch TORCH=2.15.0))
	[ -x $(TORCH_VENV)/bin/python ] || $(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|setuptools|sympy|mpmath|networkx)==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo "torch==$(TORCH)" >> $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install -qq -c constraints.txt --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install -qq -c $(TORCH_VENV)/constraints.txt \
		--build-constraint constraints.txt -e ".[train,test]"
	$(TORCH_VENV)/bin/python -m pip install -qq -c $(TORCH_VENV)/constraints.txt --no-deps nemo-automodel
	$(TORCH_VENV)/bin/python -m pytest $(ENGINE_TESTS:%=tests/%.py) $(TESTARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

families: $(INSTALLED)
	$(BIN)/python tests/sweep_families.py

# The peers are in .venv too: transformers is a dependency, and nemo-automodel the client that tests use.
bench: $(INSTALLED)
	mkdir -p docs/benchmarks
	set -e; for name in $(BENCH); do \
		$(BIN)/python benchmarks/$$name.py $(ARGS) > docs/benchmarks/$$name.md.new; \
		mv docs/benchmarks/$$name.md.new docs/benchmarks/$$name.md; \
		cat docs/benchmarks/$$name.md; \
	done

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# nemo-automodel comes without its dependencies: the tests only build its DeepSeek-V4, and what that imports is in the
# test extra. --clear only for another Python: everything else pip mends in place.
$(INSTALLED):
	[ "$$($(BIN)/python --version 2>/dev/null)" = "$$($(PYTHON) --version)" ] || $(PYTHON) -m venv --clear $(VENV)
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install -qq -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install -qq -c constraints.txt --build-constraint constraints.txt -e ".[train,test]"
	$(BIN)/python -m pip install -qq -c constraints.txt --no-deps nemo-automodel
	touch $@
