# `make demo` and `make test` are for everyone; each sets up .venv first, and a second call starts at once.
# The demo installs fedskew as a user does, and the tests all tools and extras.
# `make test` runs one method for each kind of hook on each engine. `make test-all` runs the full matrix.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python -m
INSTALL := $(RUN) pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE  # without bytecode, each process that a test starts compiles PyTorch again

.PHONY: demo test test-all test-kernels lint style docs clean

demo: $(VENV)/.demo
	$(RUN) fedskew demo

# A worker takes one file after another, longest first (tests/conftest.py), so that a file's fixtures are made once.
# There is one worker more than cores, because tests of real federations and clusters mostly wait.
test: tests := pytest -n 3 --dist loadfile --no-loadscope-reorder
test-all: tests := pytest -n 3 --dist worksteal -m "slow or not slow"

# mypy uses one core for half a minute, so it runs beside the tests. Its result follows theirs.
# The first time, one process compiles all tests and what they import. Otherwise, each worker would do so.
test test-all: style
	@$(RUN) mypy > $(VENV)/mypy.txt 2>&1 & mypy=$$!; \
	[ -e $(VENV)/.compiled ] || $(RUN) pytest --collect-only -qq > /dev/null 2>&1; touch $(VENV)/.compiled; \
	$(RUN) $(tests); tested=$$?; \
	wait $$mypy; typed=$$?; \
	echo "mypy:"; cat $(VENV)/mypy.txt; \
	exit $$((tested || typed))

# The GPU kernels, in Triton's interpreter, which needs no GPU. It also runs as a part of `make test-all`.
test-kernels: $(VENV)/.ready
	$(RUN) pip show --quiet triton 2> /dev/null || $(INSTALL) --no-deps triton
	TRITON_INTERPRET=1 $(RUN) pytest tests/engine/kernels -m "slow or not slow"

test-all: test-kernels

lint: style
	$(RUN) mypy

style: $(VENV)/.ready
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(BIN)/python -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The documentation site, in site/. A warning, such as a broken link, is an error.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

# A new pip resolves the requirements in half the time of the one in Python 3.11. Bytecode is left to the first import.
# torch is installed first and pinned: resolved along with the rest, pip may take another build of it.
define install
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'fedskew needs Python 3.11 or newer: make PYTHON=python3.11')"
	@echo "Installing fedskew and $(1) in $(VENV). The first time, this takes a minute or more."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip
	@$(INSTALL) "$(TORCH)"
	@$(INSTALL) "$(TORCH)" -e ".[$(2)]"
	@touch $(VENV)/.demo
endef

$(VENV)/.demo: pyproject.toml
	$(call install,what the demo needs,report)

$(VENV)/.ready: pyproject.toml
	$(call install,the development tools,dev)
	@touch $@

clean:
	rm -rf $(VENV)
