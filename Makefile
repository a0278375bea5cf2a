# Everything happens in .venv beside this file. `make run` is the first thing to try.
#
#   run     stream an answer from the embedded model      bench   measure the engine
#   test    lint, types of the package and the first tier of tests
#   test-more       the types of all, and the second tier of tests: CI runs both
#   docs    build/docs/index.html
#   mutants plant bugs in a copy and see the tests find them
#   sanitize        tests of kv and ops with AddressSanitizer and the like
#   explore new random examples of each property for ten minutes
#   pairs   every two features together, on all models, page sizes and seeds
#   soak    random requests through whole engines for ten minutes
#   test-optimized  the test suite under `python -O`
#   test-clocks     the test suite by clocks that go wrong
#   test-real       downloads a trained model (253 MB) and tests with it
#   test-templates  downloads published chat templates (124 MB) and renders them
#   test-clients    the newest versions of the clients that tests talk with
#   lint    ruff and pyright alone                        build   recompile native/ alone
#   check-install   constraints.txt fits PyPI's torch, with CUDA, on each Python
#   wheels  dist/*.whl for CPython 3.11, 3.12 and 3.13, each installed and streamed from
#   clean   remove what was built, keep .venv             distclean   remove .venv too
#
# PYTHON=python3.12 picks the interpreter, PROMPT="..." the question for `make run`, WORKERS=4 how
# many processes share the tests, ISAS=all compiles the kernels of all instruction sets and tests
# those that run here, for this and all later targets, and
# MUTANTS="--draw 30 --tier first" which bugs `make mutants` plants and which tests look for them,
# SANITIZERS="thread" which one `make sanitize` runs, EXPLORE="--max-seconds 60 tests/kv"
# for how long `make explore` goes on and where, PAIRS="-k preemption" which pairs `make pairs` tries,
# SOAK="--requests 100000 --seed 7" how many requests `make soak` sends, and
# WHEELS="--pythons 3.12 --out DIR" which wheels `make wheels` builds. Without an NVIDIA driver
# torch comes from PyTorch's index of CPU builds, unless pip was told where to look: see
# tools/torch_index.

SHELL := /bin/bash
.DEFAULT_GOAL := run
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

export PROMPT ?= What does json.dumps do?
WORKERS ?= $(shell $$(tools/find_python "$(PYTHON)") tools/test_workers)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Images for containers often set it. Every process would compile torch and all else anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# A question of pip would be held back with the rest of what it prints.
PIP_INSTALL := $(BIN)/python tools/show_progress $(BIN)/python -m pip install --no-input --no-compile
# Kernels of this machine's instruction set, or of all: what was asked for last.
ISAS := $(shell cat .venv/.isas 2>/dev/null || echo native)
INSTALL_ITSELF = $(PIP_INSTALL) --verbose --no-build-isolation --no-deps \
  --config-settings=cmake.define.AIOSERVE_ISAS=$(ISAS) --editable . && echo $(ISAS) > .venv/.isas
NATIVE := $(shell find native -type f) CMakeLists.txt
METADATA := pyproject.toml constraints.txt

# Stamps: what was installed, and when. With nothing changed since, no installer runs.
MADE := .venv/.made
FOR_BUILD := .venv/.for-build
FOR_RUN := .venv/.for-run
FOR_TEST := .venv/.for-test
FOR_CLIENTS := .venv/.for-clients
FOR_DOCS := .venv/.for-docs
BUILT = .venv/.built-$(ISAS)

RUFF := $(BIN)/ruff check && $(BIN)/ruff format --check

# Tests that watch the clock run behind the others, when nothing else does. Collecting all files for
# the few that have some would take half a minute.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
PYTEST := $(BIN)/python -m pytest
# Files in the order of their names: those with few tests, which would come last, are the longest.
PYTEST_SHARED = $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# pytest rewrites the assertions of tests/ into statements that -O keeps (tests/test_assertions.py),
# and warns of others.
OPTIMIZED := PYTHONOPTIMIZE=1
ASSERTED := -W "ignore:assertions not in test modules:pytest.PytestConfigWarning"
ALSO_OPTIMIZED := tests/test_assertions.py tests/kv tests/plugin_system tests/scheduling

.PHONY: run test test-more test-isas test-slow test-real test-templates test-clients test-optimized \
  test-clocks mutants sanitize explore pairs soak lint check-install wheels bench docs build clean \
  distclean

# The compiler works while pip unpacks.
define install_side_by_side
@+$(MAKE) --silent --no-print-directory --jobs=2 SIDE_BY_SIDE=1 $(1) $(BUILT)
endef

run: $(FOR_BUILD)
	$(call install_side_by_side,$(FOR_RUN))
	@$(BIN)/aioserve run pyhelp -- "$$PROMPT"

# Types of all that is public are known. pyright asks the first `python` on the path for the package;
# what it prints of a failure is shown without its list of modules.
PUBLIC_TYPES = PATH="$(CURDIR)/$(BIN):$$PATH" \
  pyright --verifytypes aioserve --ignoreexternal > .venv/.public-types || \
  { grep -v '^ *aioserve\.[a-z_.]*$$' .venv/.public-types; false; }

# Types are checked beside the tests, by whichever core is free, and told at the end: $(1) are the
# files, all if there are none, and $(2) runs the tests.
define test_beside_types
@{ $(BIN)/pyright $(1) && { $(PUBLIC_TYPES); }; } > .venv/.types 2>&1 & types=$$!; \
  $(2); tests=$$?; \
  wait $$types; types=$$?; cat .venv/.types; exit $$((tests || types))
endef

test: $(FOR_BUILD)
	$(call install_side_by_side,$(FOR_CLIENTS))
	$(BIN)/python tools/check_install
	$(RUFF)
	$(call test_beside_types,aioserve aioserve_main plugins examples,\
	  $(OPTIMIZED) $(PYTEST) $(ASSERTED) -q --tier first $(ALSO_OPTIMIZED) && \
	  $(PYTEST_SHARED) --tier first --file-seconds 10)

test-more: $(FOR_CLIENTS) $(BUILT)
	$(call test_beside_types,,\
	  $(PYTEST_SHARED) --tier more && \
	  $(OPTIMIZED) $(PYTEST_SHARED) $(ASSERTED) --tier more $(ALSO_OPTIMIZED) && \
	  $(PYTEST) -m "not slow and alone" $(ALONE))

# Kernels of all instruction sets that this machine runs, behind a build with ISAS=all.
test-isas: $(FOR_TEST) $(BUILT)
	$(PYTEST_SHARED) -q --tier first tests/ops

test-slow: lint $(FOR_CLIENTS)
	$(PYTEST_SHARED) -m "not alone"
	$(PYTEST) -m alone $(ALONE)

# Gemma 3 270M, under Gemma's terms, into ~/.cache/aioserve/real: see tools/real_model.
test-real: $(FOR_TEST) $(BUILT)
	$(BIN)/python tools/real_model
	$(PYTEST) -m real -s tests/real

# Templates in the sources of llama.cpp and vLLM, into ~/.cache/aioserve/templates: see
# tools/published_templates.
test-templates: $(FOR_TEST) $(BUILT)
	$(BIN)/python tools/published_templates
	$(PYTEST) --numprocesses $(WORKERS) -m published tests/templates

# Newest versions of the clients that tests/clients pins.
test-clients: $(FOR_TEST) $(BUILT)
	$(BIN)/python tools/install_clients --newest .venv/clients-newest
	AIOSERVE_CLIENTS=.venv/clients-newest $(PYTEST) --numprocesses $(WORKERS) tests/clients

test-optimized: $(FOR_TEST) $(BUILT)
	$(OPTIMIZED) $(PYTEST) $(ASSERTED) -m "not slow"

test-clocks: $(FOR_CLIENTS) $(BUILT)
	for clock in fast slow jumps; do AIOSERVE_CLOCK=$$clock $(PYTEST_SHARED) --tier first || exit; done

mutants: $(FOR_TEST) $(BUILT)
	$(BIN)/python -m tests.mutants $(MUTANTS)

sanitize: $(FOR_TEST) $(BUILT)
	$(BIN)/python -m tests.sanitizers $(SANITIZERS)

explore: $(FOR_TEST) $(BUILT)
	$(BIN)/python -m tests.explore --jobs $(WORKERS) $(EXPLORE)

pairs: $(FOR_TEST) $(BUILT)
	AIOSERVE_PAIRS=all $(PYTEST) --numprocesses $(WORKERS) --dist worksteal tests/pairs $(PAIRS)

soak: $(FOR_TEST) $(BUILT)
	$(BIN)/python -m tests.doubles.soak $(SOAK)

wheels: | $(MADE)
	$(BIN)/python tools/build_wheels $(WHEELS)

lint: $(FOR_TEST) $(BUILT)
	$(RUFF)
	$(BIN)/pyright
	@$(PUBLIC_TYPES)

check-install: $(FOR_TEST)
	$(BIN)/python tools/check_install

bench: $(FOR_RUN) $(BUILT)
	$(BIN)/aioserve bench throughput

docs: $(FOR_DOCS) $(BUILT)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

build: | $(FOR_BUILD)
	$(INSTALL_ITSELF)
	@touch $(BUILT)

$(MADE):
	@python=$$(tools/find_python "$(PYTHON)") && \
	  { $(BIN)/python -m pip --version >/dev/null 2>&1 || $$python -m venv .venv; } && touch $@

# The build requirements live in .venv, so that a rebuild compiles only what changed.
$(FOR_BUILD): constraints.txt | $(MADE)
	@command -v $(firstword $(CXX)) >/dev/null || command -v clang++ >/dev/null || \
	  { echo "aioserve compiles C++20: install g++ or clang++, or set CXX" >&2; exit 1; }
	@echo "Installing into .venv: the first time takes some minutes."
	@$(PIP_INSTALL) --constraint constraints.txt cmake nanobind ninja scikit-build-core
	@touch $@

define install_requirements
@echo "Installing torch and what else pyproject.toml names."
@$(BIN)/python tools/requirements $(1) > .venv/requirements.txt
@$(PIP_INSTALL) --constraint constraints.txt $$($(BIN)/python tools/torch_index) \
  --requirement .venv/requirements.txt
@touch $(FOR_RUN) $@
endef

$(FOR_RUN): $(METADATA) | $(FOR_BUILD)
	$(call install_requirements,bench server)

$(FOR_TEST): $(METADATA) | $(FOR_BUILD)
	$(call install_requirements,bench hub server test testing)

$(FOR_CLIENTS): tools/install_clients $(wildcard tests/clients/*.txt tests/clients/*.json) | $(FOR_TEST)
	$(BIN)/python tools/install_clients .venv/clients
	@touch $@

$(FOR_DOCS): $(METADATA) | $(FOR_BUILD)
	$(call install_requirements,docs server)

$(BUILT): $(NATIVE) $(METADATA) | $(FOR_BUILD)
	@echo "Compiling native/ (ISAS=$(ISAS))."
	@$(INSTALL_ITSELF)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
