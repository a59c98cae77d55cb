# Two commands for a fresh machine (Python >= 3.11, pip, a package index):  make demo   and   make test
# Both make .venv first. PYTHON chooses the interpreter, TORCH the torch release where none is installed, WORKERS how many
# processes run tests.
#
#   make quick   lint and a tenth of the tests: under 90 seconds on two cores
#   make test    what CI runs: six to thirteen minutes on two cores
#   make dist    the wheel and the sdist, built, checked, installed into an empty environment and run from there
#   make soak    every case with fresh random seeds, and all injected faults: for a night

PYTHON ?= python3
TORCH ?= 2.13.0
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test quick soak lint unit gpu docs dist clean

# what the demo needs and nothing more; an environment for tests will do
demo:
	test -e $(VENV)/ready || $(MAKE) $(VENV)/runs
	$(BIN)/packlora demo

$(VENV)/runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[gguf]"
	touch $@

# lint has one core while the tests have the others
test: $(VENV)/ready
	$(MAKE) -j2 lint unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# compiled once, also where PYTHONDONTWRITEBYTECODE is set: many tests start processes, and each would compile what it imports
unit: $(VENV)/ready
	$(BIN)/python -m compileall -q -j 0 packlora benchmarks tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

quick: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --tenth

soak: lint
	PACKLORA_SOAK=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

gpu: $(VENV)/ready
	$(BIN)/python -m pytest -m gpu tests/gpu

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site: build/site/index.html"

# an environment with no torch will do: where there is none yet, only the extra's packages are installed
$(VENV)/docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	touch $@

# torch first and by its exact release: a range could bring another build of it, gigabytes larger; of trl the chat templates
# are read, which needs nothing of what it depends on
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt trl
	touch $@

# wheel and sdist, checked as an index checks them; then the wheel in an environment of its own, outside of the checkout
dist:
	rm -rf build/dist dist && mkdir -p build/dist
	$(PYTHON) -m venv build/dist/tools
	build/dist/tools/bin/python -m pip install --quiet --disable-pip-version-check build twine
	build/dist/tools/bin/python -m build --outdir dist .
	build/dist/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist/empty
	build/dist/empty/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	build/dist/empty/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo dist/*.whl)[gguf]"
	cd build/dist && empty/bin/packlora --help && empty/bin/packlora doctor
	cd build/dist && empty/bin/packlora demo --max-steps 1

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .hypothesis *.egg-info
