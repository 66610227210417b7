# make demo   sets everything up and decodes a long prompt with the history in RAM
# make demo-cluster  two nodes under Ray on this machine, one of them killed in the middle of an answer (installs ray)
# make test   sets everything up and runs the default tests
# make slow   the slow tests, which .ci/run runs too; make long: more cases of the same, before a release
# make soak MINUTES=30  conversations come and go for so long, with aborts, forks, archives and faults; nothing may be left or lost
# make check  what runs before a commit: format, lint, types, tidy, fast tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
MINUTES ?= 5
SOAK_JSON ?= soak.json
# One thread a process: torch's OpenMP pool collapses as soon as anything else runs on the same cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-cluster test browser slow long soak check check-static format clean

demo: $(VENV)/.runtime
	$(BIN)/forebay demo

demo-cluster: $(VENV)/.cluster
	$(BIN)/forebay demo-cluster

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --durations=20

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "slow and not (alone or long or gpu)" --durations=20
	$(BIN)/python -m pytest -m "slow and alone and not (long or gpu)" --durations=10

long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "long and not (alone or gpu)" --durations=20
	$(BIN)/python -m pytest -m "long and alone and not gpu" --durations=10

soak: $(VENV)/.runtime
	$(BIN)/forebay soak --minutes $(MINUTES) --json $(SOAK_JSON)

check: check-static
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

check-static: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py

# For the tests of the page, which are skipped where there is no Chromium.
browser:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core > /dev/null; } \
	|| echo "no Chromium, and none could be installed: the page's tests are skipped"

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first and pinned: a range asked for on its own can bring a build of several gigabytes.
$(VENV)/.runtime: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.cluster: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --editable '.[cluster]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
