# Every target sets up what it needs; a second call starts at once.
#   make PYTHON=/path/to/python3.11 train     another interpreter
#   make train TRAIN_FLAGS=--seed=1           more flags for the run
#   make test PYTEST_FLAGS='-k vtrace -x'     part of the tests

PYTHON ?= python3.11
TRAIN_FLAGS ?=
PYTEST_FLAGS ?=
BENCHMARK_FLAGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
LOCKS := runtime environments dev
CODE := tunix_reverb launch benchmarks examples tests setup.py
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PACKAGE_FILES = setup.py pyproject.toml LICENSE $(wildcard README.md) \
  $$(find tunix_reverb launch -name '*.py' -o -name py.typed | LC_ALL=C sort)

.PHONY: help venv train environments test lint format lock wheel benchmark \
  clean FORCE

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' \
	  | awk -F'\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

venv: $(VENV)/.runtime $(VENV)/.wheel  ## .venv with what `make train` needs

train: venv  ## train the default agent on Catch until it is solved
	@$(BIN)/python -P -m launch.local --environment=catch \
	  --solved_return=0.95 $(TRAIN_FLAGS)

environments: $(VENV)/.environments $(VENV)/.wheel  ## add the environments' packages to .venv

# -P and the bare pytest keep the checkout off sys.path: the installed wheel is
# what the tests import. Pytest comes last, so that its summary ends the output.
test: lint $(VENV)/.wheel  ## lint, type check and run every test on the wheel
	@echo '== pytest, on the installed wheel'
	@env -u PYTHONPATH TUNIX_REVERB_TEST_WHEEL=1 \
	  $(BIN)/pytest $(PYTEST_FLAGS)

lint: $(VENV)/.dev  ## ruff, import-linter and mypy
	@echo '== ruff, import-linter, mypy'
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff rewrite the code
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

# Versions already in a lock are kept; `make lock UV_FLAGS=--upgrade` moves all.
UV_FLAGS ?=
lock: $(VENV)/.dev  ## resolve requirements/*.in into requirements/*.txt
	@cd requirements && compile() { \
	  echo "Resolving requirements/$$1.txt"; \
	  ../$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url \
	    --python-version 3.11 --generate-hashes "$$1.in" -o "$$1.txt" \
	    "$${@:2}"; \
	}; \
	compile dev $(UV_FLAGS); \
	compile environments -c dev.txt $(UV_FLAGS); \
	compile runtime -c environments.txt $(UV_FLAGS)

wheel: $(VENV)/.runtime $(VENV)/.sources  ## build dist/tunix_reverb-*.whl
	@$(MAKE) --no-print-directory dist/.wheel

benchmark: environments  ## measure pipeline, start and packing against targets
	@$(BIN)/python -m benchmarks.pipeline $(BENCHMARK_FLAGS)
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.packing

clean:  ## remove .venv, the wheel and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache \
	  .mypy_cache .import_linter_cache .hypothesis
	find tunix_reverb launch benchmarks tests -name __pycache__ -prune \
	  -exec rm -rf {} +

# --- How the targets above are made -------------------------------------------

$(VENV)/.created:
	@if [[ "$$(uname -sm)" != 'Linux x86_64' ]]; then \
	  echo "This machine is $$(uname -sm): dm-reverb has wheels for x86-64" \
	    "Linux only; use such a host or a container." >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	    2> /dev/null; then \
	  echo "'$(PYTHON)' is not Python 3.11, the last one dm-reverb has a wheel" \
	    "for: install python3.11 and python3.11-venv, or name it with" \
	    "make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2> /dev/null; then \
	  echo "'$(PYTHON)' lacks the venv module: install python3.11-venv" >&2; \
	  exit 1; fi
	@echo 'Creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Each lock holds the one before it. runtime.txt goes first on its own because
# it brings the pinned setuptools that builds bsuite, which has no wheel.
$(VENV)/.runtime: $(VENV)/.created
$(VENV)/.environments: $(VENV)/.runtime
$(VENV)/.dev: $(VENV)/.environments
$(LOCKS:%=$(VENV)/.%): $(VENV)/.%: requirements/%.txt
	@total=$$(grep -c '^[a-z].*==' $<); count=0; \
	echo "Installing the $$total packages of $<"; \
	$(PIP) install --no-deps --require-hashes --no-build-isolation \
	  --progress-bar off -r $< 2> $(VENV)/pip.log \
	  | while IFS= read -r line; do \
	  case "$$line" in \
	    Collecting* | 'Requirement already'*) \
	      count=$$((count + 1)); \
	      if [[ -t 1 ]]; then \
	        name=$${line#*: }; name=$${name#Collecting }; name=$${name%% *}; \
	        printf '\r\033[K  [%d/%d] %.60s' $$count $$total "$$name"; \
	      elif (( count % 25 == 0 )); then \
	        echo "  [$$count/$$total]"; \
	      fi ;; \
	    'Installing collected'*) \
	      if [[ -t 1 ]]; then printf '\r\033[K'; fi; \
	      echo '  unpacking' ;; \
	  esac; \
	done || { grep -v '^WARNING' $(VENV)/pip.log >&2; exit 1; }; \
	if [[ -t 1 ]]; then printf '\r\033[K'; fi
	@touch $@

# Changes only when a file of the package does: content, not times, so that a
# deleted module counts and a fresh `git checkout` of the same tree does not.
$(VENV)/.sources: $(VENV)/.created FORCE
	@sha256sum $(PACKAGE_FILES) > $@.new; \
	if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# setuptools would pack modules that only a stale build folder still holds.
dist/.wheel: $(VENV)/.sources | $(VENV)/.runtime
	@rm -rf build *.egg-info dist
	@$(PIP) wheel --quiet --no-deps --no-index --no-build-isolation \
	  --wheel-dir dist .
	@rm -rf build *.egg-info
	@touch $@
	@echo "Built $$(ls dist/*.whl)"

$(VENV)/.wheel: dist/.wheel
	@$(PIP) install --quiet --no-deps --no-index --force-reinstall dist/*.whl
	@touch $@
