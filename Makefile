# The two commands for users are `make demo` and `make test`; each sets everything up in .venv on its first run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_PROMPT := A baker fills 12 trays with 8 rolls each and sells 75 of the rolls. How many rolls are left? Explain step by step.

.PHONY: demo test lint check browser test-sglang test-vllm format clean

demo: $(STAMP)
	@$(BIN)/dspine generate --chat --compare "$(DEMO_PROMPT)"

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -m "not real" -q

browser: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -m browser

test-vllm:
	PYTHON=$(PYTHON) integrations/vllm/test.sh

test-sglang:
	PYTHON=$(PYTHON) integrations/sglang/test.sh

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python 3.10 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}; try: make PYTHON=python3.11 ...")'
	@echo "setting up .venv (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,train,report,eval,dev]'
	@touch $@
