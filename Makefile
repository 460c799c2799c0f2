# `make demo`, `make test` and `make test-all` set up all that they need.

VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Bytecode is kept, since hundreds of short processes import torch; of what is imported, when it is:
# pip would compile all of torch.
export PYTHONDONTWRITEBYTECODE =
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# More workers than cores, since some tests wait; five are no faster than four.
WORKERS ?= 4

.PHONY: demo test test-library test-tools test-all soak mutants lint types bytecode unit unit-all \
	test-trainers test-torch docs docs-check wheel gpu-check debian clean

demo: $(VENV)/.demo
	$(BIN)/gradwire demo --output report.html

# Of each product of cases a sample (tests/products.py), with kernels that compile fast. Types are
# checked while tests wait. `.venv/.passed` then has the commit, if all of it was committed.
test:
	@$(MAKE) --no-print-directory -j3 debian lint bytecode
	@$(MAKE) --no-print-directory -j2 types unit
	@[ -n "$$(git status --porcelain 2>&1)" ] || git rev-parse HEAD > $(VENV)/.passed

# Every case, with kernels as users get them.
test-all: debian lint types unit-all

lint: $(VENV)/.test
	$(BIN)/ruff check --no-cache src tests tests_tools examples scripts conftest.py docs/conf.py
	$(BIN)/ruff format --check src tests tests_tools examples scripts conftest.py docs/conf.py

types: $(VENV)/.test
	$(BIN)/mypy

IN_PARALLEL = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Of what `make test` runs, the tests of one package.
test-library: $(VENV)/.test
	$(BIN)/python scripts/suite.py $(IN_PARALLEL) tests

test-tools: $(VENV)/.test
	$(BIN)/python scripts/suite.py $(IN_PARALLEL) tests_tools

# A test that fails runs once more, alone (scripts/suite.py).
unit: $(VENV)/.test
	$(BIN)/python scripts/suite.py $(IN_PARALLEL)

# Of all tests and what they import: written once, not by all workers of xdist at once.
bytecode: $(VENV)/.test
	@$(BIN)/pytest --collect-only -qq >/dev/null 2>&1 || true

unit-all: $(VENV)/.test
	$(BIN)/python scripts/suite.py $(IN_PARALLEL) --exhaustive

# The tests whose subject is time, one by one, on cores that do nothing else.
soak: $(VENV)/.test
	$(BIN)/pytest --timing

# Small wrong changes, each of which some test must notice.
mutants: $(VENV)/.test
	$(BIN)/python scripts/mutants.py

# Every case of the trainers' tests, and the code of their pages, with one import of their packages; of
# torchtitan and torchft if they are installed.
test-trainers: $(VENV)/.test
	GRADWIRE_TEST_IMPORTS=lightning,transformers.trainer $(BIN)/pytest --exhaustive tests/trainers \
		"tests_tools/docs/test_docs.py::test_blocks_run_without_other_pages[docs/how-to/trainers.md]" \
		"tests_tools/docs/test_docs.py::test_blocks_run_without_other_pages[docs/tutorials/lightning.md]"

# The integration tests with another torch, in an environment of its own: make test-torch VERSION=2.15.0
# (docs/internals/torch-versions.md). The index has CUDA builds: some 5 GB, minutes.
TORCH_VENV ?= .venv-torch-$(VERSION)
TORCH_TESTS = tests/handles tests/middle/test_handles.py tests/middle/test_groups.py \
	tests/middle/test_backward.py tests/multiprocess/test_backend*.py \
	tests/multiprocess/test_sharded*.py tests/multiprocess/test_full_state.py \
	tests/multiprocess/test_saved_handles.py
TORCH_TOOLS = pytest pytest-xdist pytest-timeout hypothesis expecttest

test-torch: $(if $(VERSION),$(TORCH_VENV)/.test,no-version)
	$(TORCH_VENV)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(TORCH_VENV)/bin/pytest $(IN_PARALLEL) $(TORCH_TESTS)

# Each torch asks for its own Triton.
$(TORCH_VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile \
		--constraint $(TORCH_VENV)/constraints.txt --editable . torch==$(VERSION) $(TORCH_TOOLS)
	touch $@

.PHONY: no-version
no-version:
	$(error make test-torch takes a version of torch: make test-torch VERSION=2.15.0)

# The site of docs/, in build/docs.
docs: $(VENV)/.docs
	@rm -rf build/docs
	$(BIN)/python -m sphinx -qW --keep-going docs build/docs
	@echo "build/docs/index.html"

# Links, commands, figures and code blocks of README and docs (tests_tools/docs/rules.py); part of `unit`.
docs-check: $(VENV)/.test
	$(BIN)/pytest $(IN_PARALLEL) tests_tools/docs

# A wheel with kernels for every CPU of this machine's family (docs/reference/kernels.md); minutes, and a gcc.
wheel: $(VENV)/.test
	GRADWIRE_BUILD=all $(BIN)/python -m build

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .[cli,report]
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .[dev,lightning,accelerate,transformers]
	touch $(VENV)/.demo $@

$(VENV)/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .[docs]
	touch $@

# Whether target triton is right on this machine's GPU, and how fast (docs/reference/kernels.md); minutes. Uses
# the Python that is there: torch, Triton and numpy, nothing else.
gpu-check:
	PYTHONPATH=src $(PYTHON) scripts/gpu_check.py

# Fashion-MNIST for the image task. Without root or network the task says that it uses digits instead.
debian:
	@dpkg -s dataset-fashion-mnist >/dev/null 2>&1 || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq dataset-fashion-mnist >/dev/null; } || \
		echo "dataset-fashion-mnist is not installed: the image task will use scikit-learn's digits"

clean:
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
