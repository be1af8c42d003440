# Everything runs in .venv. It is filled once: what constraints.txt pins, by version and hash of every file, then torch in the
# build that this machine's index offers (docs/decisions/0007-hashes-but-for-torch.md). Later runs need no network.
# Another interpreter: make test PYTHON=python3.12.  More test processes: make test WORKERS=8.
PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.12
WORKERS ?= 2
ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
NEIGHBOURS := .venv-neighbours
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
UV ?= uv
PIP := $(BIN)/python -m pip install
LOCKED := $(PIP) --no-deps --only-binary :all: --require-hashes --requirement
LOCK := --quiet --universal --generate-hashes --python-version 3.10 --no-annotate --only-binary :all: --no-header \
	--excludes constraints-excluded.txt --no-emit-package torch pyproject.toml --extra dev
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
INLINE := TQDM_DISABLE=1 MPLBACKEND=module://matplotlib_inline.backend_inline PYTHONWARNINGS='ignore:IProgress not found'

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is kept, whatever the environment says: the tests start a hundred processes that would each compile the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: baseline benchmarks clean coverage demo docs durations equations format fuzz gallery help lint lock metrics neighbours picture portable quick reach recipe serve test test-oldest tests thresholds tutorials types

demo: $(READY)  ## run the main job: one table, and a picture in demo.png
	MPLBACKEND=Agg $(BIN)/python benchmarks/demo.py

test: lint  ## lint, types and tests; types are checked while tests run, and told after them
	@mkdir -p build
	@$(MAKE) --no-print-directory types > build/types.txt 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory tests; tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; [ $$types = 0 ] && [ $$tests = 0 ]

lint: $(READY)  ## ruff: rules and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(READY)  ## mypy --strict on the package
	$(BIN)/python -m mypy

tests: $(READY)  ## pytest; one thread in each of WORKERS processes
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

quick: $(READY)  ## under a minute: equations, recognition, a fit of each engine
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --quick $(ARGS)

durations: $(READY)  ## which tests make quick leaves out, measured: tests/longer_tests.txt
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations=0 -vv \
		| $(BIN)/python -m tests.durations

reach: build/reach  ## which tests reach a module: ARGS=laplace/pruning.py; without, how many reach each
	@$(BIN)/python -m tests.reach $(ARGS)

build/reach: | $(READY)
	mkdir -p build
	COVERAGE_FILE=build/reach $(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal \
		--cov --cov-context=test --cov-report= --cov-fail-under=0

coverage: $(READY)  ## the tests, and which lines they never reach; fails under the floor in pyproject.toml
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --cov --cov-report=term $(ARGS)

test-oldest: $(OLDEST)/.ready  ## the tests on the oldest versions that pyproject.toml claims; fetches gigabytes once
	$(ONE_THREAD) $(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

tutorials: $(READY)  ## execute tutorials/*.py into the notebooks beside them
	$(INLINE) $(BIN)/python -m jupytext --to ipynb --execute --set-kernel python3 $(sort $(wildcard tutorials/[0-9]*.py))

baseline: $(READY)  ## do 250 fits still end where they did; ARGS='--against FOLDER', '--loose', '--write'
	$(BIN)/python benchmarks/baseline.py $(ARGS)

metrics: $(READY)  ## how large the package is for its reader: now, before, asked; ARGS='--list NAME' for places
	$(BIN)/python benchmarks/metrics.py $(ARGS)

benchmarks: $(READY)  ## speed beside peers and the last release, one thread; ARGS='--write --plot' keeps it
	$(ONE_THREAD) $(BIN)/python benchmarks/releases.py $(ARGS)

portable: $(READY)  ## before a release: suite and 23 fits as four processors compute them
	$(BIN)/python benchmarks/portable.py --suite --numprocesses $(WORKERS) $(ARGS)

recipe: $(READY)  ## at a release: the hash of the archive in dist into conda/meta.yaml
	$(BIN)/python conda/fill_in.py $(ARGS)

docs: $(VENV)/.docs  ## the site, in build/site; fails on a warning or a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

serve: $(VENV)/.docs  ## the site, at localhost, rebuilt as its sources change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

fuzz: $(READY)  ## ten thousand cases of bad data over all engines; ARGS='--seed 1 --only RVM'
	$(ONE_THREAD) $(BIN)/python -m tests.fuzz $(ARGS)

neighbours: $(NEIGHBOURS)/.ready  ## fits are read by ArviZ 1.x, in an environment of its own; fetches gigabytes once
	$(ONE_THREAD) $(NEIGHBOURS)/bin/python -m pytest -c /dev/null --noconftest tests/neighbours.py $(ARGS)

gallery: $(READY)  ## a picture of each kind of model, in build/gallery, to be looked at
	$(ONE_THREAD) MPLBACKEND=Agg $(BIN)/python benchmarks/gallery.py

thresholds: $(READY)  ## which fits each number in capitals moves, at three times and a third: ARGS=laplace/type2.py
	$(BIN)/python benchmarks/thresholds.py $(ARGS)

picture: $(READY)  ## draw the imports anew in docs/architecture.md
	$(BIN)/python -m tests.architecture_page

equations: $(READY)  ## write the index of published equations, docs/equations.md
	$(BIN)/python docs/rendering/equations.py

lock:  ## pin newer versions and their hashes; wants uv, and the index for all Pythons and systems
	$(UV) pip compile $(LOCK) --upgrade --output-file constraints.txt
	cp constraints.txt build-lock.txt
	$(UV) pip compile $(LOCK) --extra docs --output-file build-lock.txt
	awk '/^[^ ]/ {head = $$0} FNR == NR {seen[$$0] = 1; next} !seen[head]' constraints.txt build-lock.txt > constraints-docs.txt
	rm build-lock.txt

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:  ## remove caches and build products; environments stay
	rm -rf build dist *.egg-info .benchmarks .coverage .mypy_cache .pytest_cache .ruff_cache demo.png
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | sort | expand -t 14

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Torch comes alone, and what it needs is there already; the package fetches nothing. The last line finds what does not fit.
$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(LOCKED) constraints.txt
	$(PIP) $(TORCH)
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@

$(VENV)/.docs: constraints-docs.txt $(READY)
	$(LOCKED) constraints-docs.txt
	touch $@

# An environment of its own, as in constraints-oldest.txt; make test-oldest OLDEST_PYTHON=/path/to/python3.10.
$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --constraint constraints-oldest.txt torch 'setuptools>=77' wheel
	$(OLDEST)/bin/python -m pip install --constraint constraints-oldest.txt --no-build-isolation --editable '.[dev]'
	touch $@

# ArviZ 1.x wants Python 3.12 or newer; make neighbours NEWEST_PYTHON=/path/to/python3.12.
$(NEIGHBOURS)/.ready: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEIGHBOURS)
	$(NEIGHBOURS)/bin/python -m pip install $(TORCH) 'arviz-base>=1' 'arviz-stats[xarray]' pytest --editable .
	touch $@
