# make demo    set up what the demo needs (no PyTorch) and run it
# make test    set up everything and run the tests, without those of make test-nightly
# make test-fast     only those that take two minutes together
# make test-nightly  those that take long, or need a browser or a cluster
# make check   formatting, lint, types, import contracts, sizes and the tests of make test
# make explore property tests on more examples, drawn anew each time
# make libero  installs LIBERO as well (2 GB) and tests what has to do with it
# make dist    builds wheels and source archives, checks them, and tries them on each Python of PYTHONS that is there
# make docs    the documentation site of this version, in build/site
# make lerobot tests what has to do with LeRobot, in an environment of its own (several GB) with Python 3.12
# A second run skips the set-up until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Pinned like everything else: without build isolation the build tools come from constraints.txt too.
INSTALL := $(PIP) --no-build-isolation -e

LEROBOT_PYTHON ?= python3.12
LEROBOT := .venv-lerobot
LEROBOT_PIP := $(LEROBOT)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-lerobot.txt

.PHONY: demo test test-fast test-nightly check explore docs dist lerobot libero clean

demo: $(VENV)/.demo
	$(VENV)/bin/specact demo

test: $(VENV)/.test
	bash scripts/check tests

test-fast: $(VENV)/.test
	bash scripts/check fast

test-nightly: $(VENV)/.test
	bash scripts/check nightly

check: $(VENV)/.test
	bash scripts/check

explore: $(VENV)/.test
	bash scripts/check explore

# The variable silences a notice of the theme's about other software.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "open build/site/index.html"

lerobot: $(LEROBOT)/.installed
	$(LEROBOT)/bin/python -m pytest tests/families/chunks/test_lerobot.py tests/plugins

libero: $(VENV)/.libero
	$(VENV)/bin/python -m pytest tests/lab/envs/test_libero.py tests/lab/envs/test_libero_expert.py \
		tests/experiments/test_libero.py

dist: | $(VENV)/.venv
	$(PIP) build hatchling packaging
	$(VENV)/bin/python -u scripts/dist.py

clean:
	rm -rf $(VENV) $(LEROBOT) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/.venv:
	@command -v $(PYTHON) >/dev/null || { echo "error: '$(PYTHON)' was not found; install Python 3.11 or newer, or say which: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: specact needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); say which to use: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The stamps stand for "installed since these two files last changed"; the environment for tests serves the demo as well.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.venv
	$(PIP) hatchling editables
	$(INSTALL) '.[server,sim,report]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.venv
	$(PIP) hatchling editables
	$(INSTALL) '.[server,sim,train,report,record,docs,vla-eval,ray,dev]'
	$(PIP) --no-deps openpi-client # it pins numpy < 2 and works with 2; tests drive our server with it
	@touch $@ $(VENV)/.demo

$(VENV)/.libero: $(VENV)/.test
	$(INSTALL) '.[libero]'
	@touch $@

# The CPU build first: the usual one brings gigabytes that only a GPU needs, but is tested as well.
$(LEROBOT)/.installed: pyproject.toml constraints-lerobot.txt plugins/lerobot_policy_specact/pyproject.toml
	$(LEROBOT_PYTHON) -m venv $(LEROBOT)
	$(LEROBOT_PIP) --index-url https://download.pytorch.org/whl/cpu torch torchvision || echo "note: no CPU build of torch there"
	$(LEROBOT_PIP) hatchling editables pytest pytest-xdist hypothesis 'lerobot[dataset,pusht,smolvla,pi,diffusion]'
	$(LEROBOT_PIP) --no-build-isolation -e '.[server,sim,train,libero]' -e plugins/lerobot_policy_specact
	@touch $@
