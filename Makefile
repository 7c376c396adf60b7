# Commands of ampfast; `make` lists them. Each first makes its own requirements.
#
#   PYTHON=python3.12   interpreter of .venv (default: the first suitable one of python3,
#                       python3.14 ... python3.10)
#   VENV=.venv312       path of the environment
#   PYTHON=... VENV=    (VENV empty) uses that interpreter unchanged, without an environment: it
#                       needs torch, setuptools and the command's tools (for `make test` pytest and
#                       numpy). The extension is built in place.
#   ARGS=...            arguments: make test ARGS="-k patch", make bench ARGS=--help

ifneq ($(filter gpu,$(MAKECMDGOALS)),)
# Uses the builds that are installed on a machine with a GPU.
VENV ?=
endif
# 3.14 is the newest Python with builds of the pinned torch.
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' \
	2>/dev/null && echo $$python && exit; done; echo python3)
endif

ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifeq ($(wildcard .venv/.installed),)
ifneq ($(shell cd / && $(PYTHON) -c 'import torch, setuptools' 2>/dev/null && echo yes),)
# An interpreter that has torch is used as it is; what draws is put beside it, where it is missing.
VENV ?=
DRAWS := $(if $(shell cd / && $(PYTHON) -c 'import matplotlib, sklearn' 2>/dev/null && echo yes),,build/draws/.installed)
else
# With little more than torch.
VENV ?= .venv-demo
NEEDS ?= requirements/build.txt
DRAWS := $(VENV:=/.draws)
MAKEFLAGS += --jobs=2
endif
endif
endif
# The default build of torch for Linux brings CUDA, several GB, which no CPU can use.
ifeq ($(shell command -v nvidia-smi),)
SMALL_TORCH ?= --extra-index-url https://download.pytorch.org/whl/cpu
endif
VENV ?= .venv
NEEDS ?= requirements/dev.txt requirements/lint.txt

# Most installed files are never imported.
export PIP_NO_COMPILE := 1

ifneq ($(VENV),)
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
TRAINERS := .venv-trainers/bin/python
TRAINERS_READY := .venv-trainers/.installed
DOCS := .venv-docs/bin/python
DOCS_READY := .venv-docs/.installed
else
RUN := $(PYTHON)
READY := python
TRAINERS := $(PYTHON)
DOCS := $(PYTHON)
endif

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
OTHER_CPP := $(wildcard tests/backends/loops/*.cpp tools/ptx_emulator/ptx_emulator/src/* tests/support/host_cuda/*.cpp tests/support/host_cuda/*.h)
# In parallel, where pytest-xdist is installed.
PARALLEL = $(if $(shell $(RUN) -c 'import xdist' 2>/dev/null && echo yes),\
	-n auto --dist loadgroup --no-loadscope-reorder)
PYTEST = $(RUN) -m pytest --durations=15 $(PARALLEL)
CLANG_FORMAT := $(RUN) -c 'from clang_format import clang_format; clang_format()'

# Says in one line what is missing, before anything is downloaded or compiled.
define require_python_and_compiler
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	echo "ampfast needs Python 3.10 or newer: install one or say PYTHON=path" \
	"($(PYTHON) --version: $$($(PYTHON) --version 2>&1 | head -n 1))" >&2; exit 1; }
@$(PYTHON) -Bc 'import setup; setup.require_toolchain()'
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: FORCE bench bench-compare build build-cuda check clean coverage demo distclean docs docstrings format \
	gpu help hostile lint mutants notebook python quick smoke test test-aarch64 test-all test-sweeps \
	test-trainers test-triton36 triton36-compiled triton36-interpreted triton36-run types wheels

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1: /p' $(MAKEFILE_LIST)
	@sed -n '/^# /!d; s/^#   /  /p' $(MAKEFILE_LIST)

# Where ampfast is installed, nothing is built.
INSTALLED := $(if $(filter demo,$(MAKECMDGOALS)),$(shell \
	cd / && $(PYTHON) -c 'import ampfast' 2>/dev/null && echo yes))
demo: $(if $(INSTALLED),,build/built) $(DRAWS)  ## train with torch's scaler and with ours: what is equal, what only ours survives
	PYTHONPATH=$(if $(INSTALLED),,.:)build/draws $(if $(INSTALLED),$(PYTHON),$(RUN)) examples/demo.py $(ARGS)

# The tests of the scaler and of its kernels.
QUICK = $(addprefix tests/,scaler clip diagnose gradients backends/test_*.py test_*.py)
quick: build/built  ## run the product's own tests, in a minute
	AMPFAST_FUZZ=60 $(PYTEST) -m "not slow and not sweep" $(QUICK) $(ARGS)

test: build/built  ## run the tests that a change can break, in five minutes
	$(PYTEST) -m "not sweep" $(ARGS)

test-all:  ## run all tests, in fifteen minutes
	@$(MAKE) --no-print-directory --keep-going test test-sweeps

test-sweeps: build/built test-triton36  ## run the exhaustive tests that `make test` leaves out
	$(PYTEST) -m sweep $(ARGS)

bench: build/built  ## measure against torch in under ten minutes; build/bench/report.html
	$(RUN) -m benchmarks --folder build/bench --limit 530 $(ARGS)

bench-compare: | $(READY)  ## compare two result files: A=before.json B=after.json
	@[ -n "$(A)" ] && [ -n "$(B)" ] || { echo "say which: make bench-compare A=before.json B=after.json" \
		>&2; exit 2; }
	$(RUN) -m benchmarks compare "$(A)" "$(B)" $(ARGS)

coverage: build/built  ## measure which lines of ampfast/ the tests run
	rm -rf build/coverage && mkdir build/coverage
	$(RUN) -m coverage run -m pytest $(PARALLEL) --ignore=tests/backends/test_over_kernels.py $(ARGS)
	TRITON_INTERPRET=1 $(RUN) -m coverage run -m pytest tests/backends/device_kernels
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

hostile: build/built  ## stress tests: sanitizers, threads, failing allocations, interrupts
	$(RUN) tests/hostile $(ARGS)

mutants: build/built  ## change ampfast line by line: which changes does no test notice?
	$(RUN) tools/mutants.py $(ARGS)

gpu: | $(READY)  ## on a GPU, with PYTHON unchanged: measure what decides, test, sanitize, benchmark
	$(RUN) tests/gpu $(ARGS)

check: lint types docstrings  ## lint, formatting, types and docstrings; edits no source

lint: | $(READY)  ## the part of check that needs no torch
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache
	$(RUN) tools/words.py
	@! grep -rnE --include=*.py '\btorch\.(zeros|ones|empty|full|tensor)\(|\.new_(zeros|ones|empty|full|tensor)\(' \
		ampfast || { echo "allocate tensors by ampfast.backends.scalars.allocate" >&2; exit 1; }
	$(CLANG_FORMAT) --dry-run -Werror $(CSRC) $(OTHER_CPP)

types: | $(READY)  ## the part that needs torch
	$(RUN) -m mypy
	$(RUN) -m mypy --config-file tests/gpu/mypy.ini

docstrings: build/built  ## the part that needs the extension: arguments and errors of public functions
	$(RUN) -m pytest -q -p no:cacheprovider tests/project/test_docstrings.py

format: | $(READY)  ## format every file
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(CLANG_FORMAT) -i $(CSRC) $(OTHER_CPP)

build: build/built  ## build the extension in place, and the CUDA kernels where nvcc is

test-aarch64: build/built  ## compile the core for aarch64 and run its loops under qemu, where these are installed
	$(RUN) -m pytest -rs tests/backends/loops $(ARGS)

test-triton36: build/built build/triton36/.installed  ## test the kernels under the oldest Triton
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync \
		triton36-compiled triton36-interpreted triton36-run

# The oldest Triton precedes that of the environment. No shell in between, which would end alone on a
# signal to make.
TRITON36 := PYTHONPATH="$(CURDIR)/build/triton36" $(RUN) -m pytest

triton36-compiled:
	@exec env $(TRITON36) tests/backends/triton_kernels $(ARGS)

triton36-interpreted:
	@exec env TRITON_INTERPRET=1 $(TRITON36) $(PARALLEL) tests/backends/device_kernels $(ARGS)

triton36-run:
	@exec env AMPFAST_TEST_KERNELS=triton-sm_90-races $(TRITON36) \
		tests/backends/device_kernels/test_device_finish.py $(ARGS)

build/triton36/.installed: requirements/triton36.txt build/key
	rm -rf $(@D)
	$(RUN) -m pip install --target $(@D) -r $<
	@touch $@

test-trainers: build/built $(TRAINERS_READY)  ## test trainers of other projects with ampfast's scaler
	$(TRAINERS) -m pytest tests/trainers $(ARGS)

.venv-trainers/.installed: requirements/torch.txt requirements/trainers.txt
	$(RUN) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install -r requirements/torch.txt
	.venv-trainers/bin/python -m pip install -r requirements/trainers.txt -r requirements/torch.txt
	@touch $@

notebook: build/built  ## run the notebook of the examples and save its outputs
	$(RUN) -m tests.project.notebooks examples/underflow.ipynb

docs: $(DOCS_READY)  ## build the documentation, build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS) -m mkdocs build --strict $(ARGS)

.venv-docs/.installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -r $<
	@touch $@

wheels: python  ## build the source distribution and a wheel in dist/, for all torches or TORCHES="2.13.0 2.14.1"
	@$(PYTHON) tools/wheels.py make $(TORCHES)

smoke:  ## test that wheel with the oldest and the newest torch, or with TORCHES, without a compiler
	@$(PYTHON) tools/wheels.py try $(TORCHES)

build-cuda: .venv-cuda/.installed  ## build against a CUDA build of torch (several GB), in .venv-cuda
	$(MAKE) build VENV= PYTHON=.venv-cuda/bin/python

.venv-cuda/.installed: requirements/cuda.txt requirements/dev.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install -r requirements/cuda.txt
	.venv-cuda/bin/python -m pip install -r requirements/dev.txt -r requirements/cuda.txt
	@touch $@

clean:  ## remove build results
	rm -rf build dist *.egg-info ampfast/_C.*.so ampfast/kernels.fatbin .mypy_cache .pytest_cache .ruff_cache ampfast-demo.png
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf .venv*

python:
	$(require_python_and_compiler)

$(VENV)/pyvenv.cfg:
	$(require_python_and_compiler)
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; \
		echo "$(PYTHON) cannot make an environment: install its venv module (apt install python3-venv)" \
		>&2; exit 1; }

# What torch needs comes with the rest: pip would look for each of these in the other index, too.
$(VENV)/.torch: requirements/torch.txt $(VENV)/pyvenv.cfg
	$(RUN) -m pip install --no-deps $(SMALL_TORCH) -r $<
	@touch $@

build/draws/.installed: requirements/demo.txt
	$(PYTHON) -m pip install --quiet --target $(@D) -r $<
	@touch $@

$(VENV)/.draws: requirements/demo.txt $(VENV)/pyvenv.cfg
	@$(RUN) -m pip install --quiet -r $<
	@touch $@

# The first file includes the others.
$(VENV)/.installed: $(NEEDS) $(VENV)/.torch $(DRAWS)
	$(RUN) -m pip install -r $< -r requirements/torch.txt
	@touch $@

# Changes only when an earlier extension no longer fits: another torch, Python or compiler.
build/key: FORCE | $(READY)
	@mkdir -p build
	@new=$@.$$$$; $(RUN) -Bc 'import setup; print(setup.build_key())' > $$new || { rm -f $$new; exit 1; }; \
	if cmp -s $$new $@ && ls ampfast/_C.*.so >/dev/null 2>&1; then rm $$new; \
		else rm -rf build/temp*; mv $$new $@; fi

# The stamp has the time of the start, so that an edit during the build is not lost.
build/built: build/key $(CSRC) setup.py pyproject.toml
	@touch $@.new
	@echo "building the extension, which takes a minute or two; log: build/log"
	@MAKEFLAGS= $(RUN) setup.py --quiet build_ext --inplace --force > build/log 2>&1 || \
		{ cat build/log; exit 1; }
	@sed -n '/^ampfast is built/p' build/log
	@mv $@.new $@
