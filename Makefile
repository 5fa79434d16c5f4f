# Everything works in a fresh clone with nothing but Python 3.11 to 3.13 and make.
#
#   make demo    generate text with a real model on this machine
#   make test    run the tests
#   make lint    formatting, lint and types
#   make core-coverage   the core's tests, which reach every line and branch of it
#   make bench   the suites of bench/, some minutes
#   make bench-compare BASE=COMMIT   this working tree against a commit, in turn on this machine
#   make clean   remove the environment and every cache in this folder

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

DEMO_PROMPT ?= Explain in three sentences why the sky is blue.

.PHONY: demo test lint core-coverage bench bench-compare clean
.SUFFIXES:

demo: $(INSTALLED)
	@echo "== nanovllm generate: $(DEMO_PROMPT)" >&2
	@$(BIN)/nanovllm generate --chat --summary --max-tokens 160 "$(DEMO_PROMPT)"

test: $(INSTALLED)
	@echo "== tests" >&2
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	@echo "== ruff, mypy" >&2
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Not through pytest-cov, which starts after the plugins of pytest were imported, ours among them.
core-coverage: $(INSTALLED)
	@echo "== coverage of nanovllm/core" >&2
	@$(BIN)/coverage run --branch --source=nanovllm/core -m pytest tests/core -q
	@$(BIN)/coverage report --skip-covered --fail-under=100

bench: $(INSTALLED)
	@echo "== benchmarks" >&2
	@$(BIN)/python -m pytest bench --benchmark-only --benchmark-columns=median,iqr,max,rounds $(PYTEST_ARGS)

bench-compare: $(INSTALLED)
	@test -n "$(BASE)" || { echo "make bench-compare BASE=COMMIT" >&2; exit 2; }
	@echo "== this working tree against $(BASE)" >&2
	@$(BIN)/python -m bench.compare "$(BASE)"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "== installing into $(VENV) (once; a minute or a few)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "nanovllm needs Python 3.11 to 3.13; this is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
