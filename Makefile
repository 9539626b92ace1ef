# Two commands are all a fresh machine needs: `make demo` and `make test`.
# Both set up the virtual environment in .venv first; Python 3.11 or newer with venv is the only requirement.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUELRAIL := $(BIN)/fuelrail
DEMO ?= .demo
# Makes the wheel for aarch64 where it is there (Debian packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross).
CROSS ?= aarch64-linux-gnu-gcc
# Without an NVIDIA GPU this build of torch comes first, so that no CUDA packages are pulled; with one, torch comes by range.
CPU_TORCH ?= torch==2.13.0
# The extra with DALI for the CUDA that the driver knows: 13 needs driver 580.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
DALI := $(shell test "$(DRIVER)" -ge 580 2>/dev/null && echo dali-cu13 || echo dali)
# Its own requirements pin numpy below 2 though it runs with 2, so it is installed without them (the tests use it as an oracle).
DEVKIT := nuscenes-devkit==1.2.0

# Modules are compiled as they are imported: pip would compile all 14,000 of them, which takes longer than to install them.
INSTALL := $(BIN)/pip install -qq --no-compile -c .ci/constraints.txt

# Two workers more than there are CPUs, for many tests wait for processes, servers and disks. Files start in the order that
# tests/conftest.py gives them.
WORKERS = $(shell expr $$(nproc) + 2)
PYTEST = $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 5 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of interpreters: without compiled files on disk, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# What `make test-pages` runs, as pytest's -k: all, or "first" for what a new reader does first.
PAGES ?=

# What codespell reads; its settings are in pyproject.toml.
SPELLED := *.md bench configs docs loaders pipeline sharding tests .src/fuelrail/*.py

.PHONY: help setup demo pictures compiled test test-fast test-slow test-pages coverage test-floors lint fix types docs wheel bench dali test-dali test-ray gpu-check clean

help:
	@echo "make demo       set up, synthesise, shard, verify, draw a sample, train on 2 ranks, write the report"
	@echo "make test       set up and run the test suite, all but the slow lane"
	@echo "make test-fast  set up and run the first case of each quick test of the unit lane"
	@echo "make test-slow  proofs that are repeated: every strategy, 500 kills, the planner against real runs"
	@echo "make test-pages what README, quickstart and guides print, in an environment with the extras that they name"
	@echo "make coverage   the unit lane, and the share of each hall's lines that it runs"
	@echo "make test-dali  DALI's own tests, on the CPU and on fake devices"
	@echo "make test-ray   the tests on a Ray cluster of three nodes"
	@echo "make test-floors  the unit lane with the lowest torch, numpy, pyarrow and DALI, in .venv-floors"
	@echo "make lint       ruff check, format check and codespell"
	@echo "make fix        apply what ruff can fix and format"
	@echo "make types      mypy, strict"
	@echo "make docs       the documentation as a site in build/site; a warning is an error"
	@echo "make wheel      sdist, and a wheels with the native decoder (manylinux), in dist/"
	@echo "make bench      the micro-benchmarks of this repository, as ratios"
	@echo "make pictures   make the pictures of docs/ again (needs chromium)"
	@echo "make dali       also install NVIDIA DALI and NVML, for the driver here; tests of DALI run then (on the CPU)"
	@echo "make gpu-check  everything that needs a GPU: install DALI, check, measure, write a result file; CHECK='--seconds 600'"
	@echo "make clean      remove the demo's output and caches (not .venv)"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/constraints.txt .ci/hatch_build.py $(wildcard pipeline/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --upgrade "pip>=24"
	@command -v nvidia-smi >/dev/null 2>&1 || $(INSTALL) "$(CPU_TORCH)"
	$(INSTALL) -e ".[dev]"
	$(INSTALL) --no-deps $(DEVKIT)
	@touch $@

demo: setup
	@mkdir -p $(DEMO)
	$(FUELRAIL) synth $(DEMO)/nuscenes --seed 7
	$(FUELRAIL) shard nuscenes:$(DEMO)/nuscenes $(DEMO)/dataset -o version=v1.0-mini --seed 7 --shard-size 8MB --workers 2
	$(FUELRAIL) verify $(DEMO)/dataset --deep
	$(FUELRAIL) view $(DEMO)/dataset --image bevdet-704x256 --train --output $(DEMO)/sample.png
	$(FUELRAIL) bench train $(DEMO)/dataset --ranks 2 --out $(DEMO)/bench
	@echo
	@echo "Look at:"
	@echo "  file://$(abspath $(DEMO))/sample.png         one sample, its boxes drawn through the augmentation"
	@echo "  file://$(abspath $(DEMO))/bench/report.html  occupancy, time breakdown of each step, what the loader did"
	@echo "  file://$(abspath $(DEMO))/bench/report.json  the same as data"

# A small sample, the first screen of the report, and the end of what `make demo` prints: pictures of README.md.
pictures: setup
	@mkdir -p $(DEMO)
	$(MAKE) --no-print-directory demo | tee $(DEMO)/demo.txt
	{ echo '<meta charset="utf-8"><pre style="font: 13px/1.35 monospace; white-space: pre-wrap; background: #1e1e1e; color: #ddd; margin: 0; padding: 12px; height: 100vh">'; \
		sed -n '/accelerator occupancy/,/^Ranks/p' $(DEMO)/demo.txt | sed '$$d; s/&/\&amp;/g; s/</\&lt;/g'; echo '</pre>'; } >$(DEMO)/demo.html
	sed 's/^height: 256/height: 120/; s/^width: 704/width: 330/' configs/images/bevdet-704x256.yaml >$(DEMO)/small.yaml
	$(FUELRAIL) view $(DEMO)/dataset scene-9003-000004 --image $(DEMO)/small.yaml --train --output docs/assets/sample.png
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,705 \
		--screenshot=docs/assets/report.png "file://$(abspath $(DEMO))/bench/report.html"
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,520 \
		--screenshot=docs/assets/demo.png "file://$(abspath $(DEMO))/demo.html"
	$(BIN)/python -m fuelrail.bench.studies.compare.plots bench/results/compare.json docs/assets/compare.svg
	$(BIN)/python -m fuelrail.bench.studies.resume.drawing bench/results/resume.json docs/assets/stacks.svg

test: setup
	$(PYTEST) -m "not long"

# What each worker of the first `make test` in a checkout would do at the same time: compile the modules that tests import,
# and rewrite the tests' assertions.
compiled: setup
	$(BIN)/python -m pytest -qq --collect-only -m "not long" >/dev/null

# Its tests wait for nothing, and each worker imports all of them.
test-fast: WORKERS = $(shell nproc)
test-fast: setup
	$(PYTEST) -m unit --first-cases

# Those of tests/slow are collected only where the folder is named, and not beside the folder that holds it.
test-slow: setup
	$(BIN)/python -m pytest -v -m long tests
	$(BIN)/python -m pytest -v -m long tests/slow

# README, quickstart and guides in an environment of their own, with the extras that each names, and a base install in
# another one. They are made anew: 2.8 GB.
test-pages: setup
	$(BIN)/python -m pytest -v tests/slow/test_fresh_pages.py -k "$(PAGES)"

coverage: setup
	$(PYTEST) -m unit --cov --cov-report=
	@for hall in pipeline sharding loaders bench; do \
		echo "$$hall: $$($(BIN)/python -m coverage report --include="$$hall/*" --format=total) % of the lines by the unit lane"; \
	done

test-floors:
	.ci/floors

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $(SPELLED)

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

docs: setup
	$(INSTALL) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "file://$(abspath build/site)/index.html"

wheel: setup
	$(INSTALL) -e ".[release]"
	rm -rf dist build/wheel
	$(BIN)/python -m build --sdist --outdir dist .
	# The decoder is compiled in place, so this machine's own comes last.
	if command -v $(CROSS); then CC=$(CROSS) _PYTHON_HOST_PLATFORM=linux-aarch64 $(BIN)/python -m build --wheel --outdir build/wheel .; fi
	$(BIN)/python -m build --wheel --outdir build/wheel .
	.ci/repair-wheel build/wheel dist

bench: setup
	$(BIN)/python -m fuelrail.bench.micro.metadata

dali: setup
	$(INSTALL) -e ".[dev,$(DALI),nvml]"

test-dali: dali
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist load tests/loaders/decode/test_dali.py \
		tests/loaders/decode/test_dali_install.py tests/loaders/decode/test_splice.py tests/sharding/test_dali_reader.py \
		tests/gpu/test_decoder.py

# Its clusters take as long as a third of the suite, so `make test` skips these where Ray is not installed.
test-ray: setup
	$(INSTALL) -e ".[dev,ray]"
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 2 --dist loadfile tests/sharding/engines/test_on_ray.py \
		tests/loaders/serving/test_remote.py tests/bench/annotation/test_on_ray.py tests/bench/studies/loader/test_command.py

gpu-check: dali
	$(BIN)/python -m pytest -v -m gpu tests/gpu --out gpu-check.json $(CHECK)

clean:
	rm -rf "$(DEMO)" .pytest_cache .mypy_cache .ruff_cache .hypothesis
