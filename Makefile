# Two commands for a fresh machine (Python >= 3.11, pip, a package index):  make demo   and   make test
# Both make .venv first. PYTHON chooses the interpreter, TORCH the torch release where none is installed.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint unit gpu clean

demo: $(VENV)/ready
	$(BIN)/packlora demo

test: lint unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest

gpu: $(VENV)/ready
	$(BIN)/python -m pytest -m gpu tests/gpu

# torch first and by its exact release: a range could bring another build of it, gigabytes larger
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .hypothesis *.egg-info
