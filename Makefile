# make demo    sets everything up, then shows that a job survives the loss of a node
# make test    sets everything up, then runs every test
# make bench   sets everything up, then runs every benchmark (bench-NAME: those of one suite)
#
# All work from a fresh clone with Python 3.12 or 3.13 (PYTHON=... names one), pip and a C++ compiler, as root or not.

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Seconds for all tests together; a run of CI may take 90 minutes.
TEST_BUDGET_S ?= 4200
PYTEST_ARGS ?=
# Of the simulator, beside the tests that start jobs: from which seed on, and how many. tests/sim itself has those before.
SCHEDULES ?= 20000 200000

PURE := -p megatron.hotswap.control -p megatron.hotswap.simulate -p megatron.hotswap.sizing \
	-m megatron.hotswap.recovery.plan -m megatron.hotswap.replication.placement -m megatron.hotswap.snapshot.layout \
	-m megatron.hotswap.snapshot.manifest -m megatron.hotswap.topology.grid

.PHONY: demo test test-all bench setup lint types clean

demo: $(READY)
	$(PY) tools/demo.py

# In two parts, each to its end: tests that need one core share the cores, file by file; those that start jobs, measure time or look
# for what processes leave behind run one by one. (5 is pytest's "no tests ran", as when PYTEST_ARGS chooses one of the other part.)
# Beside the second part, schedules of the simulator take what the processors have left (not where PYTEST_ARGS chooses tests).
TESTS := $(PY) -m pytest --session-timeout=$(TEST_BUDGET_S)
test: $(READY)
	@failed=; set -x; \
	$(TESTS) -n logical --maxprocesses 4 --dist loadfile $(PYTEST_ARGS) tests/style tests/unit tests/sim \
		|| [ $$? -eq 5 ] || failed="style, unit or sim"; \
	$(if $(PYTEST_ARGS),:,$(PY) tests/sim/sweep.py $(SCHEDULES)) & sweep=$$!; trap 'kill $$sweep 2>/dev/null' EXIT INT TERM; \
	$(TESTS) $(PYTEST_ARGS) tests/conformance tests/distributed tests/gpu tests/slurm || [ $$? -eq 5 ] \
		|| failed="$$failed conformance, distributed or slurm"; \
	wait $$sweep || failed="$$failed schedules of the simulator"; \
	set +x; [ -z "$$failed" ] || { echo "make test: a test failed in: $$failed (the summaries stand above)" >&2; exit 1; }

# The whole matrix of faults, phases and grids, however long it takes, after lint and types.
test-all: lint types
	DEADPOOL_FULL_MATRIX=1 $(PY) -m pytest $(PYTEST_ARGS) tests

# Every figure beside its threshold; fails where one falls short. benchmarks/results/ keeps them.
bench: $(READY)
	$(PY) benchmarks/run.py all

bench-%: $(READY)
	$(PY) benchmarks/run.py $*

setup: $(READY)

lint: $(READY)
	$(VENV)/bin/ruff check .

types: $(READY)
	$(PY) -m mypy --strict $(PURE)

# Made again when what it was made from has changed; an environment that is there is kept and completed.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.hpp csrc/*.inl) tools/find_python.sh
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "no C++ compiler was found (c++, g++, clang++); install one (Debian, Ubuntu: apt-get install g++)" >&2; exit 1; }
	@if ! $(PY) -c "import pip, sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))" 2>/dev/null; then \
		python=$$(sh tools/find_python.sh) || exit 1; \
		echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV) || exit 1; fi
	@echo "installing PyTorch, Megatron and the tools (about 5 GB, once) and building the engine …"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel pybind11
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 megatron-core==0.19.2
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
		--config-settings editable_mode=compat --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find deadpool_ext -name "*.so" -delete
