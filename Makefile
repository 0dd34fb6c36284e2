# `make demo` and `make test` need nothing but Python 3.11+ and a network that reaches a package registry.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Real data sets, where they lie beside the project (see docs/data.md).
ifneq ($(wildcard ../shared/data),)
export CWFED_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo test test-all test-federation lint types check bench install install-dev clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: install    ## FedAvg against cwFedAvg on the embedded digits: a table and a report page
	$(BIN)/cwfed demo

test: install-dev    ## the suite, a few minutes
	$(BIN)/python -m pytest -q -m "not slow and not federation"

test-all: install-dev ## the suite with the slow checks on real data
	$(BIN)/python -m pytest -q

test-federation: install-dev ## Flower's real processes: TLS, keys, kills, bad nodes; some minutes
	$(BIN)/python -m pytest -q -m federation

lint: install-dev    ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev   ## types
	$(BIN)/mypy

check: lint types test ## everything before a commit

bench: install   ## our engines side by side with published-style code, about ten minutes (cwfed bench --quick: three)
	$(BIN)/cwfed bench

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# torch is pinned in the constraints: a plain `torch` pulls gigabytes of CUDA packages.
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed $(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "cwfed needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$(EXTRAS)"
	@touch $@

clean:           ## remove what the targets above made
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
