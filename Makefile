# `make tune` and `make test` each do all the set-up that they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUDGET ?= 120s
TESTERS ?= 2
QUICK := not gpu and not slow

.PHONY: tune test check test-gpu test-slow golden clean

tune: $(STAMP)
	$(BIN)/tune --budget $(BUDGET)

test: $(STAMP)
	$(BIN)/pytest -m "$(QUICK) and not alone" --numprocesses $(TESTERS) --dist loadfile \
	  --no-loadscope-reorder
	$(BIN)/pytest -m "$(QUICK) and alone"

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/tune freeze --check

test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

golden: $(STAMP)
	$(BIN)/pytest tests/test_golden.py --update-golden

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Once more, last: Ray has a command `tune` too.
	$(BIN)/pip install --quiet --no-deps --force-reinstall --editable .
	touch $@

clean:
	rm -rf $(VENV) build dist .tuner
