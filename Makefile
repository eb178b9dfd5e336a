# The commands of the README. Everything is installed into .venv, and only if pyproject.toml or a native kernel changed.

VENV := .venv
RUN := $(VENV)/bin/python -m
# The one to build .venv with; `make PYTHON=/path/to/python3.12 demo` chooses another.
PYTHON := python3 python3.13 python3.12 python3.14 python3.11

.PHONY: help demo test check test-slow test-clients clients lint model clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo 'make demo          install mlxserve and its default model, and see it answer'
	@echo 'make check         lint, types, import rules and the fast tests: two minutes or so'
	@echo 'make test          the same and every test but the slow ones: what CI runs'
	@echo 'make test-slow     the slow tests'
	@echo 'make test-clients  those of them that talk to the server with other clients'
	@echo 'make clean         remove .venv and everything built'

demo: $(VENV)/runtime.stamp
	$(VENV)/bin/mlxserve generate --prompt 'Why is the sky blue? Answer in two sentences.'

# pytest comes last: the end of its output is what CI and people read.
test: lint model
	@$(RUN) pytest -n 2 -m 'not slow'

check: lint
	@$(RUN) tests.support.sizes
	@$(RUN) pytest -n 2 -m 'not slow and not real and not full'

test-slow: model clients
	@$(RUN) pytest -m slow

test-clients: clients
	@$(RUN) pytest tests/clients

# Clients of the HTTP server that can't be installed beside the newest ones. Node's needs npm.
clients: $(VENV)/clients.stamp

model: $(VENV)/dev.stamp
	@for name in smollm2-135m gemma3-270m; do $(VENV)/bin/mlxserve pull $$name || exit 1; done

CPP_FILES := $(wildcard mlxserve/kernels/cpu/*.cpp mlxserve/kernels/cpu/*.h \
  tests/support/metal/runtime/* tests/support/metal/include/msl/*)

lint: $(VENV)/dev.stamp
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@$(RUN) pyright --pythonpath $(VENV)/bin/python
	@$(VENV)/bin/lint-imports

# torch first and alone, so that nothing else's looser wish chooses its release.
$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	@$(RUN) pip install --group torch
	@$(RUN) pip install --group dev
	@touch $@

CLIENTS := tests/clients

$(VENV)/clients.stamp: $(CLIENTS)/requirements.txt $(CLIENTS)/package.json | $(VENV)/dev.stamp
	@rm -rf $(VENV)/clients
	@$(RUN) venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install -r $(CLIENTS)/requirements.txt
	@if command -v npm >/dev/null; then \
	  npm install --prefix $(CLIENTS) --no-package-lock --no-audit --no-fund; \
	else \
	  echo 'no npm here: the npm client is left out'; \
	fi
	@touch $@

NATIVE := setup.py $(wildcard mlxserve/kernels/cpu/*.cpp mlxserve/kernels/cpu/*.h)

$(VENV)/runtime.stamp: $(VENV)/bin/python pyproject.toml $(NATIVE)
	@$(RUN) pip install --upgrade pip
	@$(RUN) pip install -e .
	@touch $@

# MLX has wheels for Apple silicon and for Linux; a Python for Intel Macs would find none.
$(VENV)/bin/python:
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import ensurepip, platform, sys, venv; \
	      intel_mac = (sys.platform, platform.machine()) == ("darwin", "x86_64"); \
      sys.exit(sys.version_info < (3, 11) or intel_mac)' \
	      >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$python"; \
	    rm -rf $(VENV); \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo 'error: no Python 3.11 or later with venv here (an arm64 one on a Mac). Get one with'; \
	echo '  Mac:            brew install python@3.13'; \
	echo '  Debian, Ubuntu: sudo apt-get install python3 python3-venv'; \
	echo 'or name yours:    make PYTHON=/path/to/python3 demo'; \
	exit 1

clean:
	rm -rf $(VENV) $(CLIENTS)/node_modules build dist *.egg-info mlxserve/kernels/cpu/*.so .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
