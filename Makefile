# Everything a developer runs. Each target sets up what it needs in .venv; nothing is installed elsewhere.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := build/demo
KILLS ?= 200
FUZZ_SECONDS ?= 600

.PHONY: help setup demo test test-full test-faults test-kills test-sanitized fuzz bench lint format bench-layout clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo          the bundled Kimi K3 model the whole way: plan, pack, verify, inspect, run'
	@echo 'make test          run all tests'
	@echo 'make test-full     packs of one layer of Kimi K3 at its real size, without its weights (minutes, Linux)'
	@echo 'make test-faults   every system call of a pack fails once, and the power fails at every one (minutes)'
	@echo 'make test-kills    SIGKILL at every system call of a pack, and KILLS=200 times at random (minutes)'
	@echo 'make test-sanitized  the native kernels under AddressSanitizer and UBSan'
	@echo 'make fuzz          mutated inputs for every parser, FUZZ_SECONDS=600 in all'
	@echo 'make lint          ruff and mypy'
	@echo 'make format        let ruff rewrite the sources'
	@echo 'make bench         error and speed of every effort, side by side (about five minutes)'
	@echo 'make bench-layout  measure record layouts (needs a C compiler)'
	@echo 'make clean         remove what these targets made'

setup: $(READY)

$(READY): pyproject.toml setup.py $(wildcard formats/kernels/*.c formats/kernels/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'moepack needs Python 3.11 or newer; name one with: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	@touch $@

demo: $(READY)
	$(BIN)/moepack demo --dir $(DEMO)

test: $(READY)
	$(BIN)/python -m pytest -q

test-full: $(READY)
	MOEPACK_FULL_SIZE=1 $(BIN)/python -m pytest -q -s --timeout 3600 tests/fullsize

test-faults: $(READY)
	MOEPACK_FAULTS=all $(BIN)/python -m pytest -q -s --timeout 3600 tests/faults --deselect tests/faults/test_kills.py

test-kills: $(READY)
	MOEPACK_KILLS=$(KILLS) $(BIN)/python -m pytest -q -s --timeout 3600 tests/faults/test_kills.py

test-sanitized: $(READY)
	tests/faults/sanitized $(BIN)/python

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]' \
		|| echo 'scikit-learn and faiss cannot be installed here: they are left out of the comparison' >&2
	$(BIN)/python -m benchmarks.run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-layout:
	bash benchmarks/layout/run.sh

clean:
	rm -rf build $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
