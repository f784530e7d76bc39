# `make demo` and `make test` are for everyone; each sets up .venv first, and a second call starts at once.
# `make test` runs one method for each kind of hook on each engine. `make test-all` runs the full matrix.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m

.PHONY: demo test test-all lint clean

demo: $(VENV)/.ready
	$(RUN) fedskew demo

test: $(VENV)/.ready lint
	$(RUN) pytest -n 2 --dist worksteal

test-all: $(VENV)/.ready lint
	$(RUN) pytest -n 2 --dist worksteal -m "slow or not slow"

lint: $(VENV)/.ready
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(BIN)/python -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# torch is installed first and pinned: resolved along with the rest, pip may take another build of it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'fedskew needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RUN) pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
