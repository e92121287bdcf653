# `make demo` and `make test` need only Python 3.11 or newer, pip and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test gpu-test clean

# Train the tiny model by RL, on the CPU, and print before and after.
demo: $(VENV)/.installed
	rm -rf demo
	$(BIN)/qerl train output_dir=demo

# Lint, types, tests: all on the CPU, two tests at a time with one thread each.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The tests that need a CUDA GPU, with the packages of the python on the PATH.
gpu-test:
	$(PYTHON) -m pytest -m gpu

$(VENV)/.installed: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
