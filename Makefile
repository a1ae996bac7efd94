# make start    set up and train a real model on real data over several ranks (no root, no compiler)
# make test     set up everything (system packages too, if root or sudo allow) and run what matters
# make test-all what `make test` leaves out: every mistake, every broken line, signals, leftovers
# make lessons  run every lesson in reading order, one line each; ONLY=fsdp/ some of them
# make bench    every speed ratio this course states, ours beside the library's
# Each may be run again at any time, after an interruption too.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

start: .venv/core
	$(BIN)/python fundamentals/00_check_your_machine.py
	@echo; echo "=== Training on several ranks: parallelism/01_data_parallelism_ddp.py"; echo
	$(BIN)/python parallelism/01_data_parallelism_ddp.py

test: .venv/all
	@$(call run_tests,not slow)

test-all: .venv/all
	@$(call run_tests,slow)

# First what no clock decides, on WORKERS processes: three keep two cores busy, since tests also
# wait. Then, alone on the machine, what a clock decides: this is repeated when it fails, unless
# something failed that no clock decides (pyproject.toml).
PYTEST := $(BIN)/python -m pytest --durations=10
WORKERS ?= 3
define run_tests
$(PYTEST) -m "$(1) and not clock" -n $(WORKERS) --dist worksteal; exact=$$?; \
test $$exact -le 1 || exit $$exact; \
$(PYTEST) -m "$(1) and clock" --reruns 2 && exit $$exact
endef

lessons: .venv/core
	$(BIN)/python -m course.run_lessons --only=$(ONLY)

bench: .venv/all
	$(BIN)/python -m benchmarks

# For those who write lessons: the plumbing into every lesson, measured results into README.
plumbing: .venv/core
	$(BIN)/python -m course.shared_code

results: .venv/all
	$(BIN)/python -m course.run_lessons --keep --only=$(ONLY)
	$(if $(ONLY),,$(BIN)/python -m benchmarks --keep)
	$(BIN)/python -m course.tables

lint: .venv/all
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv/made:
	@echo "=== A virtual environment in .venv"
	@$(PYTHON) -m venv .venv || { echo "*** Python's venv is missing: sudo apt install python3-venv"; exit 1; }
	@touch $@

.venv/core: .venv/made pyproject.toml constraints.txt
	@echo "=== The core: torch and what every lesson imports (some GB, minutes the first time)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/all: .venv/core packages.txt
	@sh course/system_packages.sh
	@echo "=== DeepSpeed, FFCV, profiling and test tools"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[deepspeed,profiling,test]'
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[ffcv]' \
	  || echo "*** FFCV could not be built: its lesson will say BLOCKED. It needs the packages in packages.txt"
	@touch $@

.PHONY: start test test-all lessons bench plumbing results lint
