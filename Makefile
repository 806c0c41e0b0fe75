# Every target creates .venv and installs what it needs, if that is not done already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
DEVICE ?= cuda
URL :=
BUILT_FROM := pyproject.toml constraints.txt $(wildcard foedus/kernels/*.[ch])
# By path, not by import hook: in the parent folder of the clone, its directory would shadow a hook.
INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat
# Printed before an installation, with its extra.
SAY = @echo "Installing foedus[$(1)] and the packages it needs into $(VENV), once: a few minutes, most of them for PyTorch."

.PHONY: help demo test test-slow gpu-test coverage lint docs docs-serve bench papers faults fuzz mutants lock sbom dist clean

help:
	@echo "make demo    what each family does that averaging cannot, on bundled data; prints and writes a page (under a minute after installation)"
	@echo "make test    all tests, on two cores; real data sets are used where FOEDUS_DATA points to them"
	@echo "make test-slow  the tests that take minutes: real federations for every family"
	@echo "make gpu-test  compares runs on a GPU with those on the CPU; without a GPU it says so (DEVICE=mps for another device than cuda)"
	@echo "make coverage  branch coverage of foedus/ by make test, by file, the lowest first"
	@echo "make lint    ruff, mypy, and which package may import which"
	@echo "make docs    the site, into site/, without a network; its start page is site/index.html"
	@echo "make docs-serve  the site on 127.0.0.1:8000, built again when a page changes"
	@echo "make bench   speed, as ratios measured in one run (ARGS='w1 w3' for some of them; ARGS=--docs writes docs/results/performance.md)"
	@echo "make faults  processes killed, disks full, checkpoints damaged: every run gives the right result or a clear error (ARGS=--quick: seconds)"
	@echo "make fuzz    a million mutated messages, and files"
	@echo "make mutants hand-made faults, one at a time: the tests must detect 95 % (ARGS='fedfw-* wire' for some of them; ARGS=--check: seconds)"
	@echo "make lock    requirements.lock: what a deployment installs, with hashes"
	@echo "make sbom    sbom.json: the packages in .venv, as a CycloneDX bill of materials (ARGS='-o FILE' for another place)"
	@echo "make dist    dist/: the source distribution, and one wheel for CPython 3.11 and later on this system, both checked (URL=ADDRESS of the project: links in its metadata and description)"
	@echo "make papers  every table and figure of the papers at --quick, and their pages"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.report: $(VENV)/bin/python $(BUILT_FROM)
	$(call SAY,report)
	@$(INSTALL) -e ".[report]"
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(BUILT_FROM)
	$(call SAY,dev)
	@$(INSTALL) -e ".[dev]"
	@touch $(VENV)/.report $(VENV)/.docs $@

$(VENV)/.docs: $(VENV)/bin/python $(BUILT_FROM)
	$(call SAY,docs)
	@$(INSTALL) -e ".[docs]"
	@touch $@

demo: $(VENV)/.report
	$(BIN)/foedus demo $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

gpu-test: $(VENV)/.dev
	FOEDUS_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -m gpu -rs tests/gpu $(ARGS)

coverage: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" --cov --cov-report=term-missing:skip-covered $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict $(ARGS)

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000 $(ARGS)

bench: $(VENV)/.report
	$(BIN)/python -m benchmarks $(ARGS)

faults: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.faults $(ARGS)

fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.fuzz $(ARGS)

mutants: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ARGS)

# Indexes and folders of wheels are those that uv is configured with (UV_DEFAULT_INDEX, UV_INDEX, UV_FIND_LINKS).
lock: $(VENV)/.dev
	$(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 --custom-compile-command "make lock" -c constraints.txt \
		--extra flower --extra secure --extra private --no-annotate -o requirements.lock pyproject.toml $(ARGS)

# The tool checks what it writes against CycloneDX's schema.
sbom: $(VENV)/.dev
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible -o sbom.json $(ARGS) $(BIN)/python

# Built from the source distribution, in which tools/release.py writes the project's address.
# auditwheel determines on which systems the compiled loops work, and names the wheel accordingly.
dist: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --sdist --outdir build/repository
	$(BIN)/python -m tools.release build/repository/*.tar.gz build/source --url "$(URL)"
	$(BIN)/python -m build --no-isolation --outdir build/dist build/source/*
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair build/dist/*.whl --wheel-dir dist
	mv build/dist/*.tar.gz dist
	rm -rf build
	$(BIN)/twine check --strict dist/*

papers: $(VENV)/.report
	$(BIN)/foedus paper all all --quick $(ARGS)
	$(BIN)/foedus paper --docs docs/results

clean:
	rm -rf $(VENV)
