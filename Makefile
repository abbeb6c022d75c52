# Every verb of the project; a laptop and CI run the same lines.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
TARGET ?= cpu
ARGS ?=
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.10; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)

UV_VERSION := 0.13.8
UV := $(VENV)/bin/uv
PY := $(VENV)/bin/python
LOCK := locks/$(TARGET).txt
TOOL := $(VENV)/.uv-$(UV_VERSION)
# The environment is current while a stamp of this name exists: it says what was installed, and from where.
STAMP := $(VENV)/.corun-$(shell { echo $(CURDIR) $(UV_VERSION); cat $(LOCK) pyproject.toml 2>/dev/null; } | sha256sum | cut -c1-16)
# Which checkout the environment imports. Only `make setup` gives it to another one, unless that one is gone.
OWNER := $(VENV)/.checkout
export UV_HTTP_TIMEOUT ?= 300
# What uv says of each package, except of downloads that take long.
NOISE := /^ ([-+~]|Downloaded) /d; /^Downloading .*\(([0-9.]+KiB|[0-9]{1,2}\.[0-9]MiB)\)$$/d

.PHONY: help setup demo chat test test-all chaos fuzz check proto docs docs-site fmt lock release-check clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo "  VENV=$(VENV) PYTHON=$(PYTHON) TARGET=$(TARGET) (cpu or gpu) ARGS='…' for demo, chat, tests, chaos and fuzz"

setup: $(STAMP) ## Make the virtual environment from the lock file

$(TOOL):
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
		echo "make setup: the engine's packages exist for Linux on x86_64 only; this is $$(uname -sm)" >&2; exit 1; fi
	@if ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then \
		echo "make setup: needs Python 3.10, 3.11 or 3.12; name one with PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "make setup: $(PYTHON) has no venv module; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; \
		exit 1; fi
	@echo "==> virtual environment $(VENV) with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv --clear "$(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

$(LOCK):
	@echo "make setup: TARGET must be cpu or gpu, not $(TARGET)" >&2; exit 1

$(STAMP): | $(LOCK) $(TOOL)
	@owner=$$(cat "$(OWNER)" 2>/dev/null || true); \
	if [ -n "$$owner" ] && [ "$$owner" != "$(CURDIR)" ] && [ -f "$$owner/pyproject.toml" ]; then \
		if [ -z "$(filter setup,$(MAKECMDGOALS))" ]; then \
			echo "make: $(VENV) belongs to the checkout $$owner, which would lose it." >&2; \
			echo "      Name another one with VENV=…, or give it to this checkout with: make setup VENV=$(VENV)" >&2; \
			exit 1; fi; \
		echo "==> $(VENV) was of the checkout $$owner; now it is of this one"; fi
	@rm -f $(VENV)/.corun-*
	@echo "$(CURDIR)" > "$(OWNER)"
	@echo "==> packages of $(LOCK) (a few GB the first time)"
	@# Compiled now: where bytecode is not written later, every start of an engine would compile torch and vLLM again.
	@$(UV) pip sync --python $(PY) --require-hashes --compile-bytecode $(LOCK) 2>&1 | sed -uE '$(NOISE)' >&2
	@$(UV) pip install --python $(PY) --quiet --offline --no-deps --no-build-isolation --editable .
	@echo "==> the model that make demo and make chat talk with (93 MB the first time)"
	@$(PY) -m corun model --name smollm2 || { [ $$? = 4 ] && echo "make setup: went on without smollm2" >&2; }
	@touch $@
	@echo "==> the environment is ready; to use it: . $(VENV)/bin/activate"

demo: $(STAMP) ## Start a cluster on the CPU, stream a dozen chats, kill a node, verify every bit, stop
	@$(PY) examples/demo.py $(ARGS)

chat: $(STAMP) ## Talk with a small model in the terminal; ARGS='--router HOST:PORT' for a running cluster
	@$(PY) -m corun chat $(ARGS)

# Unit tests run two at a time, since they mostly wait. Tests with engines use all cores, and share one cluster.
# ARGS may select no test of a part (exit code 5).
test: $(STAMP) ## Run the unit tests, and one real cluster for bits, handoff, failover and what can be observed
	@$(PY) -m pytest -m "not e2e and not gpu and not slow" -n 2 --dist loadfile --durations=30 $(ARGS) || [ $$? = 5 ]
	@$(PY) -m pytest -m "e2e and not gpu and not slow" --durations=30 $(ARGS) || [ $$? = 5 ]

test-all: test ## Run all tests: also Ray, pods, benchmarks, two kinds of nodes and more engines
	@$(PY) -m pytest -m "slow and not gpu" --durations=30 $(ARGS) || [ $$? = 5 ]

chaos: $(STAMP) ## Kill, stop and break nodes under load; ARGS='--engines real --seed 1 --faults 30', or fake ones
	@$(PY) -m tests.chaos $(ARGS)

fuzz: $(STAMP) ## Throw hostile bytes and clients at fake engines; ARGS='--engines real --minutes 30' besieges a real cluster
	@$(PY) -m tests.fuzz $(ARGS)

check: $(STAMP) ## Lint, formatting, types, and generated code that is up to date
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call protoc,"$$fresh"); \
	diff -r -x __init__.py -x __pycache__ "$$fresh/corun/v1" corun/v1 || \
		{ echo "corun/v1 is not what protos/ gives; run: make proto" >&2; exit 1; }

proto: $(STAMP) ## Generate corun/v1 from protos/ again
	@rm -f corun/v1/*_pb2.py corun/v1/*_pb2.pyi corun/v1/*_pb2_grpc.py
	@$(call protoc,.)

protoc = $(PY) -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) protos/corun/v1/*.proto

docs: $(STAMP) ## Write docs/settings.md again from the config classes, and docs/protos.md from protos/
	@$(PY) -m corun.config.docs > docs/settings.md
	@$(PY) docs/tools/protos.py > docs/protos.md

docs-site: $(STAMP) ## Build the docs site into site/, with every link checked; it needs no network
	@$(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "docs site: file://$(CURDIR)/site/index.html"

fmt: $(STAMP) ## Format the code and mend what ruff can
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

# The marker that every package would carry. Without it, another platform is told which package it lacks.
COMMON := python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'

lock: $(TOOL) ## Resolve the lock files again; ARGS=--upgrade moves the versions
	@for target in cpu gpu; do \
		$(UV) pip compile pyproject.toml --quiet --universal --python-version 3.10 --extra $$target --extra dev \
			--generate-hashes --no-annotate --custom-compile-command "make lock" $(ARGS) -o locks/$$target.txt; \
		sed -i -E "s/ ; $(COMMON)( \\\\|$$)/\1/" locks/$$target.txt; done
	@# A router's versions are those of its nodes; what builds an image is in neither.
	@$(UV) pip compile pyproject.toml --quiet --universal --python-version 3.10 --extra router --extra tracing \
		--constraint locks/cpu.txt --generate-hashes --no-annotate --custom-compile-command "make lock" -o locks/router.txt
	@printf 'uv==%s\nhatchling\n' $(UV_VERSION) | $(UV) pip compile - --quiet --universal --python-version 3.10 \
		--constraint locks/cpu.txt --generate-hashes --no-annotate --custom-compile-command "make lock" -o locks/build.txt
	@for target in router build; do sed -i -E "s/ ; $(COMMON)( \\\\|$$)/\1/" locks/$$target.txt; done

release-check: $(STAMP) ## Check tag, version, CHANGELOG.md and the distributions, which are left in dist/
	@$(PY) .ci/release.py $(ARGS)

clean: ## Remove caches and build output
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment as well
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
