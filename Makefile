# One command equals CI. `make setup` builds .venv; every other target depends on it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: setup demo check test test-all bench rules-book clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt torch numpy
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(VENV)/bin/shardwise demo

check: setup
	$(VENV)/bin/ruff check src tests benchmarks
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright src

test: check
	$(PY) -m pytest -q -n 2 -m "not full"

# The long sweeps. QUARTER=0..3 runs one quarter of them (CI rotates by commit); BUDGET=SECONDS starts none after that.
test-all: setup
	$(PY) -m pytest -q -n 2 -m full $(if $(QUARTER),--quarter $(QUARTER),) $(if $(BUDGET),--budget $(BUDGET),)

bench: setup
	$(PY) -m benchmarks.$(NAME) $(ARGS)

# Rediscovers the rules of the common operators and rewrites the book that ships with the package.
rules-book: setup
	$(VENV)/bin/shardwise rules --ship

clean:
	rm -rf $(VENV) build dist src/*.egg-info
