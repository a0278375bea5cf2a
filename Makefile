# Everything happens in .venv beside this file. `make run` is the first thing to try.
#
#   run     stream an answer from the embedded model      bench   measure the engine
#   test    lint, types and the test suite                docs    build/docs/index.html
#   lint    ruff and pyright alone                        build   recompile native/ alone
#   clean   remove what was built, keep .venv             distclean   remove .venv too
#
# PYTHON=python3.12 picks the interpreter, PROMPT="..." the question for `make run`.

SHELL := /bin/bash
.DEFAULT_GOAL := run
.NOTPARALLEL:

PROMPT ?= What does json.dumps do?
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
EDITABLE := $(PIP_INSTALL) --no-build-isolation --editable ./plugins --editable
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h') CMakeLists.txt
METADATA := pyproject.toml plugins/pyproject.toml constraints.txt

# Stamps: what was installed, as of when. A run with nothing changed starts no installer.
VENV := .venv/.made
BUILT := .venv/.built
WITH_TEST := .venv/.with-test
WITH_DOCS := .venv/.with-docs

.PHONY: run test test-slow lint bench docs build clean distclean

run: $(BUILT)
	@$(BIN)/aioserve run "$(PROMPT)"

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: lint
	$(BIN)/python -m pytest

lint: $(WITH_TEST) $(BUILT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(BUILT)
	$(BIN)/aioserve bench throughput

docs: $(WITH_DOCS)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

build: | $(VENV)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .

$(VENV):
	@python=$$(tools/find_python "$(PYTHON)") && \
	  { [ -x $(BIN)/python ] || $$python -m venv .venv; } && touch $@

# The build requirements live in .venv, so that a rebuild compiles only what changed.
.venv/.with-build: constraints.txt | $(VENV)
	@command -v $(firstword $(CXX)) >/dev/null || command -v clang++ >/dev/null || \
	  { echo "aioserve compiles C++20: install g++ or clang++, or set CXX" >&2; exit 1; }
	@echo "Installing into .venv; the first time takes some minutes, most of them for torch."
	$(PIP_INSTALL) cmake nanobind ninja scikit-build-core
	@touch $@

.venv/.with-run: $(METADATA) | .venv/.with-build
	$(EDITABLE) .
	@touch $@ $(BUILT)

$(WITH_TEST): $(METADATA) | .venv/.with-build
	$(EDITABLE) '.[hub,test]'
	@touch .venv/.with-run $(BUILT) $@

$(WITH_DOCS): $(METADATA) | .venv/.with-build
	$(EDITABLE) '.[docs]'
	@touch .venv/.with-run $(BUILT) $@

$(BUILT): $(NATIVE) .venv/.with-run
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
