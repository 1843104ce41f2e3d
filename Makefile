# Everything a person or CI runs. Two commands matter: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOOPBACK := scripts/loopback

.PHONY: demo serve test test-gpu lint types unit docs audit model clean help

help:            ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

model: $(STAMP)  ## fetch and convert the default model into the cache folder
	$(BIN)/rakv model fetch smollm2

demo: model      ## install, start a one-node service, ask, restart, ask again, print the table
	$(LOOPBACK) $(BIN)/rakv demo

serve: model     ## the same service, left running until Ctrl-C
	$(BIN)/rakv serve

lint: $(STAMP)   ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy

unit: model      ## the tests that start no Ray
	$(BIN)/pytest -m 'not cluster'

# OpenMP's threads spin while they wait; where several processes share few cores, that is most of
# the time.
test: lint types model  ## all checks and all tests
	OMP_WAIT_POLICY=PASSIVE $(LOOPBACK) $(BIN)/pytest

test-gpu: $(STAMP) ## the tests that need a GPU; skipped where there is none
	$(BIN)/pytest -m gpu

clean:           ## remove the virtual environment and caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site sbom.json *.egg-info
