# Targets for people and for CI. Everything runs in .venv, which is made when it is missing; name another interpreter
# that has torch (a GPU machine, a machine without a network) with PYTHON=..., and nothing is installed.
#   make test-gpu PYTHON=python3

VENV := .venv
TORCH ?= $(shell cat requirements/torch.txt)
# Test processes: one more than two cores, because some tests wait for ranks that failed on purpose.
JOBS ?= 3

ifdef PYTHON
  DEMO_READY :=
  TEST_READY :=
else
  PYTHON := $(VENV)/bin/python
  DEMO_READY := $(VENV)/demo.ready
  TEST_READY := $(VENV)/test.ready
endif

# What is imported is compiled once, by the first that does, also where Python is told to keep nothing; all of torch
# would take longer than the install.
PIP = $(PYTHON) -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=

test test-gpu validate: export OMP_NUM_THREADS ?= 1

.PHONY: help build wheel demo test test-gpu lint validate bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.* ## (.*)/  make \1\t\2/' | expand -t 18

build: $(DEMO_READY) ## write build/torch-<backend>/, the package as the Hub serves it
	$(PYTHON) tools/make_build.py

wheel: $(DEMO_READY) ## write dist/sharded_muon-<version>-py3-none-any.whl, the package as a wheel
	$(PYTHON) tools/wheel_backend.py

demo: build ## train a small GPT with Muon and with AdamW, and compare them (about 3 minutes on 2 cores)
	$(PYTHON) examples/demo.py $(ARGS)

test: $(TEST_READY) ## run the CPU test suite (about 12 minutes on 2 cores)
	CUDA_VISIBLE_DEVICES= LOCAL_KERNELS= $(PYTHON) -m pytest -n $(JOBS) --maxschedchunk 1 $(ARGS)

test-gpu: $(TEST_READY) ## run the tests that need one or more GPUs
	LOCAL_KERNELS= $(PYTHON) -m pytest -m "gpu or gpus" $(ARGS)

lint: $(TEST_READY) ## check style with ruff
	$(PYTHON) -m ruff check .

validate: $(TEST_READY) ## check the build with the loader's own parsers, and load it in every way
	LOCAL_KERNELS= $(PYTHON) -m pytest tests/test_package.py tests/test_style.py $(ARGS)

bench: $(TEST_READY) build ## time orthogonalize (on the GPU where there is one)
	$(PYTHON) -c 'from kernels.cli import main; main()' benchmark . $(ARGS)

clean: ## remove builds and caches, but not .venv
	rm -rf build dist result .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch comes first, in a step of its own: the rest must not choose another build of it.
$(VENV)/demo.ready: requirements/torch.txt requirements/demo.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	python3 -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -r requirements/demo.txt
	touch $@

$(VENV)/test.ready: $(VENV)/demo.ready requirements/test.txt requirements/triton.txt requirements/small_frameworks.txt
	$(PIP) -r requirements/test.txt \
		$$($(PYTHON) -c 'import triton' 2>/dev/null || echo -r requirements/triton.txt)
	$(PIP) --no-deps -r requirements/small_frameworks.txt
	touch $@
