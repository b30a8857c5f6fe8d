# Everything a newcomer needs: `make demo` and `make test` set up their own environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs-installed

.PHONY: help demo test test-slow browser check format bench bench-peers docs clean

help:
	@echo "make demo         train a small model on real text, kill it, resume it, and write a report"
	@echo "make test         run the tests"
	@echo "make test-slow    run the tests that take minutes"
	@echo "make browser      install the browser that the tests of the report need (Debian's)"
	@echo "make check        formatting, lint and types"
	@echo "make format       format the code"
	@echo "make bench        run the benchmarks (on an idle machine)"
	@echo "make bench-peers  measure Penstock beside other loaders, each in an environment of its own (20 to 60 minutes)"
	@echo "make docs         build the documentation as HTML into artifacts/docs"
	@echo "make clean        remove the environment and everything made"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=python3.12 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/penstock demo

test: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800

# The report is looked at in a real browser. Where there is none and none can be had, those tests are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		SUDO=$$(test "$$(id -u)" = 0 || echo sudo -n); \
		$$SUDO apt-get update -qq && \
		$$SUDO apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
		echo "No chromium and chromedriver here: the tests of the report in a browser will be skipped."

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# Environments of some gigabytes are made below PENSTOCK_BENCH_DIR, or the temporary folder, and kept.
bench-peers: $(STAMP)
	$(BIN)/python benchmarks/peers

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(DOCS)

# A warning is an error: a page that no other leads to, a link to nowhere, a docstring that cannot be shown.
docs: $(DOCS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs artifacts/docs
	@echo "artifacts/docs/index.html"

clean:
	rm -rf $(VENV) build dist artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
