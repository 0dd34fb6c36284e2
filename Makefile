# `make demo` and `make test` need nothing but Python 3.11+ and a network that reaches a package registry.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Real data sets, where they lie beside the project (see docs/data.md).
ifneq ($(wildcard ../shared/data),)
export CWFED_DATA ?= $(abspath ../shared/data)
endif

# Compiled once and kept: the suite starts many processes, and pytest takes ten seconds per worker to rewrite its asserts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-federation fuzz soak lint types check bench docs reference notebooks install install-dev install-docs install-locked lock licences settings clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: install    ## FedAvg against cwFedAvg on the embedded digits: a table and a report page
	$(BIN)/cwfed demo

test: install-dev    ## the suite, a few minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not federation"

test-all: install-dev ## the suite with the slow checks on real data
	$(BIN)/python -m pytest -q

test-federation: install-dev ## Flower's real processes: TLS, keys, kills, bad nodes; some minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "federation and not slow"

fuzz: install-dev    ## some thirty thousand damaged and hostile inputs, about ten minutes
	$(BIN)/python -m pytest -q -s -m fuzz tests/fuzz

soak: install-dev    ## ten minutes of kills, full disks and damage
	CWFED_SOAK_SECONDS=600 $(BIN)/python -m pytest -q -s -m slow tests/chaos

lint: install-dev    ## style, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: install-dev   ## types
	$(BIN)/mypy

check: lint types docs test ## everything before a commit

bench: install   ## our engines side by side with published-style code, about ten minutes (cwfed bench --quick: three)
	$(BIN)/cwfed bench

docs: install-docs   ## the documentation site, strictly: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-docs: $(VENV)/.installed-docs

# torch is pinned in the constraints: a plain `torch` pulls gigabytes of CUDA packages.
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-docs: EXTRAS := [docs]
$(VENV)/.installed $(VENV)/.installed-dev $(VENV)/.installed-docs: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "cwfed needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$(EXTRAS)"
	@touch $@

# Exactly the files of the lock file, or nothing; on Linux x86-64 torch's CPU build must be among what pip can find (docs/guarantees.md).
install-locked:  ## the pinned versions, every file checked against its hash
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .

lock: install-dev    ## requirements.lock from constraints.txt; TORCH_WHEEL=... adds the hash of torch's CPU build
	$(BIN)/python tools/lock.py $(TORCH_WHEEL)

settings: install-dev    ## the tables of docs/configuration.md from the code
	$(BIN)/python tools/settings.py

reference: settings      ## all that docs/ has from the code: settings, commands, methods
	$(BIN)/python tools/commands.py
	$(BIN)/python tools/methods.py

notebooks: install       ## execute docs/notebooks and keep what they print and draw
	$(BIN)/python tools/notebooks.py

licences: install-dev install-docs    ## docs/licences.md from the installed packages
	$(BIN)/python tools/licences.py

clean:           ## remove what the targets above made
	rm -rf $(VENV) demo build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
