# One target each for what people do here; CI (.ci/run) calls the same ones.
#
#   make train                        a tiny model on this machine, in runs/tiny-<time>
#   make test  TESTARGS="-k pool"     the tests
#   make check                        ruff and mypy
#   make clean                        removes caches and builds; keeps .venv and runs/
#
# The first call builds .venv from constraints.txt, and again when a pin, pyproject.toml or the Python version changes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TESTARGS ?=

BIN := $(VENV)/bin
PINS := $(shell { $(PYTHON) --version; cat pyproject.toml constraints.txt; } | cksum | tr ' ' '-')
INSTALLED := $(VENV)/.installed-$(PINS)

.PHONY: train test check clean

train: $(INSTALLED)
	$(BIN)/dsv4-fsdp train --run-dir runs/tiny-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TESTARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
