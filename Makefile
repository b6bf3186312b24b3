# `make demo` and `make test` set up what they need in .venv, once, and again when the sources have changed.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := $(shell find pipes -not -path '*__pycache__*') README.md LICENSE

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# The tests run against the installed wheel: `pipes/` is not on the import path.
test: $(VENV)/.installed
	PYTHONPATH= $(BIN)/pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "penstock needs Python 3.11 or newer, and $(PYTHON) is " \
	    + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt $(SOURCES)
	@echo 'Installing penstock and what it is tested with into $(VENV); the first time takes a minute or more.'
	rm -rf dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	$(PIP) install --constraint constraints.txt "$$(echo dist/penstock-*.whl)[test,examples,trainers]"
	$(PIP) install --no-deps --force-reinstall dist/penstock-*.whl
	touch $@
