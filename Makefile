# SPDX-License-Identifier: Apache-2.0
# Every target works in a fresh clone with only python3 >= 3.11 (with venv) and make.
#   PYTHON=...     the interpreter to use; another one than before rebuilds the environment
#   VENV=...       where the environment lies
#   TEST_JOBS=...  test processes side by side (each forces eight CPU devices); 0: in this one
#   TEST_ARGS=...  more arguments for pytest
#   BENCH_ARGS=..  arguments for the benchmarks: names of some of them, --folder for their files

PYTHON ?= python3
VENV ?= .venv
GPU_VENV ?= $(VENV)-gpu
BENCH_VENV ?= $(VENV)-bench
TEST_JOBS ?= 2
TEST_ARGS ?=
BENCH_ARGS ?=

RUN := $(VENV)/bin/python -m
PYTEST = $(RUN) pytest -n $(TEST_JOBS) --dist worksteal $(TEST_ARGS)

.PHONY: help train test test-slow test-all notebooks doctest lint types check format clean bench venv gpu-venv bench-venv

help:
	@echo 'make train      train the synthetic example and print its AUC'
	@echo 'make test       the quick tests'
	@echo 'make test-all   every test, those that compile for GPUs too'
	@echo 'make notebooks  run the notebooks'
	@echo 'make bench      time the step beside FBGEMM and PyTorch, disks and tiers; within an hour, quiet machine'
	@echo 'make check      lint, types, doctests and the quick tests'
	@echo 'make lint       ruff and the import rules;  make types: mypy;  make doctest'
	@echo 'make format     put the source in order'
	@echo 'make clean      remove the environments, builds and caches'

train: venv
	$(RUN) jaxsparse train examples/synthetic.toml

test: venv
	$(PYTEST) -m 'not slow and not gpu_compile'

test-slow: venv gpu-venv
	JAXSPARSE_GPU_COMPILE_PYTHON='$(abspath $(GPU_VENV))/bin/python' \
		$(PYTEST) -m 'slow or gpu_compile'

test-all: venv gpu-venv notebooks
	JAXSPARSE_KILLS=10 \
	JAXSPARSE_GPU_COMPILE_PYTHON='$(abspath $(GPU_VENV))/bin/python' $(PYTEST)

notebooks: venv
	$(PYTEST) --nbmake notebooks

bench: bench-venv
	$(BENCH_VENV)/bin/python -m benchmarks $(BENCH_ARGS)

doctest: venv
	JAX_PLATFORMS=cpu $(RUN) pytest --doctest-modules jaxsparse $(TEST_ARGS)

lint: venv
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports --no-logo

types: venv
	$(RUN) mypy

check: lint types doctest test

format: venv
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
		.hypothesis .coverage htmlcov
	find jaxsparse tests scripts benchmarks -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true

venv:
	@scripts/venv.sh dev '$(VENV)' '$(PYTHON)'

bench-venv:
	@scripts/venv.sh bench '$(BENCH_VENV)' '$(PYTHON)'

gpu-venv:
	@scripts/venv.sh gpu '$(GPU_VENV)' '$(PYTHON)'
