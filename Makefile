# Everything runs from a virtual environment that the first target creates.  `make` lists targets.

VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
# Versions that an environment is held to.
CONSTRAINTS ?= constraints.txt
PIP    := $(PY) -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)

# PYTEST_ARGS: more pytest arguments (-n 4, -k name, --lf).  BENCH_ARGS: a benchmark's own.
# TORCH_ARGS: pip arguments for torch alone, to choose a build (see constraints.txt).
PYTEST_ARGS ?=
BENCH_ARGS  ?=
TORCH_ARGS  ?=
# Minutes of all campaigns together in test-all, on two cores.
MINUTES     ?= 135

# Idle OpenMP threads sleep instead of spinning: a spinning pool starves the copy thread and the
# keeper on small machines, and every timing with them.
export OMP_WAIT_POLICY ?= PASSIVE

# Compiled modules are kept: each process that a test or demo starts would compile all of autockpt.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-nodes test test-oldest prose docs picture test-frameworks test-slurm endings cases check test-all clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-zA-Z%_-]+:.*## / { sub("%", "NAME", $$1); printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The two steps are apart so that a chosen torch build is there before anything asks for torch.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "autockpt needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, a few minutes): torch ..."
	@$(PIP) $(TORCH_ARGS) torch
	@echo "installing into $(VENV): autockpt, its dependencies and the development tools ..."
	@$(PIP) -e ".[dev]"
	@touch $@
	@echo "$(VENV) is ready"

demo: $(VENV)/.ready  ## profile, train, kill, resume and report on a small model
	$(PY) examples/demo.py

demo-nodes: $(VENV)/.ready  ## lose one of four nodes (network namespaces, needs root) and go on
	$(PY) examples/demo_nodes.py

# Tests of whole jobs have processes of their own, which mostly wait.
JOBS := $(addprefix tests/,campaigns jobs unit/integrations)

# Tests that fail are tried once more, one at a time.  Both tries are printed: one that fails and then
# passes depends on the machine's load, and is to be mended.
define tested
	@set -- -m "not slow" $(1) $(PYTEST_ARGS); echo "pytest $$*"; \
	$(PY) -m pytest "$$@"; code=$$?; \
	if test $$code -eq 1; then \
	  echo "Some tests failed.  They are tried once more, one at a time."; \
	  $(PY) -m pytest "$$@" -n 0 --last-failed --last-failed-no-failures none; code=$$?; \
	fi; test $$code -eq 0 -o $$code -eq 5
endef

test: $(VENV)/.ready  ## the tests without the slow ones
	$(call tested,-n 2 --dist loadfile $(JOBS:%=--ignore=%))
	$(call tested,-n 2 --dist loadfile $(JOBS))

# PYTHON=python3.12 takes another Python as well.
test-oldest:  ## `make test` with the oldest torch that is supported, in .venv-oldest
	@$(MAKE) --no-print-directory test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# Each framework has an environment of its own, made once: .venv-NAME with the extra NAME.
FRAMEWORKS ?= huggingface accelerate lightning ignite deepspeed torchtitan ray trackers
# What tests need beside it: models of PEFT and TRL are trained in Trainer.
BESIDE_huggingface := peft trl
# Ray stores to S3, which a test emulates.
BESIDE_ray := obstore 'moto[s3,server]'
.venv-%/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-$*
	@echo "installing into .venv-$* (once, a few minutes) ..."
	@.venv-$*/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt $(TORCH_ARGS) torch
	@.venv-$*/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".[$*]" $(BESIDE_$*) pytest pytest-timeout hypothesis
	@touch $@

# Each has so many minutes, beside its installation.
FRAMEWORK_MINUTES ?= 60
test-frameworks: $(VENV)/.ready  ## adapters against the real frameworks, killed and resumed
	$(PY) -m tests.frameworks --minutes $(FRAMEWORK_MINUTES) $(FRAMEWORKS) -- $(PYTEST_ARGS)

test-slurm: $(VENV)/.ready  ## jobs on a real Slurm of this machine (root; Debian's slurm and munge)
	$(PY) -m pytest tests/slurm -v $(PYTEST_ARGS)

endings: $(VENV)/.ready  ## signal x when x launcher x tier x grace, with real processes
	$(PY) -m pytest tests/jobs/endings $(PYTEST_ARGS)

cases: $(VENV)/.ready  ## jobs as users write them, each with what must hold (tests/cases/README.md)
	$(PY) -m tests.cases

prose: $(VENV)/.ready  ## show the sentences that break a rule of prose
	$(PY) -m tests.test_prose

docs: $(VENV)/.ready  ## write what comes from code, then build the site into docs/_build
	$(PY) -m tests.test_docs
	@$(PIP) -e ".[docs]"
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build

picture: $(VENV)/.ready  ## make the README's picture from a run of some minutes (needs chromium)
	$(PY) docs/pictures/make_report.py

check: $(VENV)/.ready  ## format, lint, types and the import rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_architecture.py

test-all: $(VENV)/.ready  ## every test, slow ones too, then every campaign for MINUTES=135
	$(PY) -m pytest --hypothesis-profile new $(PYTEST_ARGS)
	$(PY) -m tests.campaigns all --minutes $(MINUTES) --workers 2 --out benchmarks/results/campaigns.json
	$(PY) -m tests.campaigns.table

bench-%: $(VENV)/.ready  ## run benchmarks/NAME.py (bench-device-copy runs device_copy.py)
	@test -f benchmarks/$(subst -,_,$*).py || { \
	  echo "no benchmarks/$(subst -,_,$*).py; there are:" $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)) >&2; exit 2; }
	$(PY) -m benchmarks.$(subst -,_,$*) $(BENCH_ARGS)

clean:  ## remove caches and build output; keeps the environment and runs/
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(wildcard autockpt tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +
