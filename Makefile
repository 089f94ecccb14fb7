# `make demo` and `make test` need Python 3.11 or later and nothing else: they make their own environment in .venv.
# ARGS goes to what a target runs: make test ARGS='-m "not engine"'

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.defib-installed
ARGS ?=

.PHONY: demo test bench lint format venv clean
.DEFAULT_GOAL := demo

demo: $(STAMP)  ## a recovery on an embedded engine: no GPU, no weights, under a minute
	@$(BIN)/defib demo $(ARGS)

test: $(STAMP)  ## the whole suite; tests of a real vLLM are skipped, with the reason, where it isn't installed
	@$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP)  ## the figures of docs/design.md section 11; BENCH_OUT=FILE writes them as JSON lines too
	@$(BIN)/python -m tests.bench $(ARGS)

lint: $(STAMP)  ## format, lint, floors, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP)

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	@python=; \
	for name in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "defib needs Python 3.11 or later, and none was found; PYTHON=/path/of/python names one" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	"$$python" -m venv $(VENV) || { \
	  echo "$$python can't make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	}
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
