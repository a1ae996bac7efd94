# make start    set up and train a real model on real data over several ranks (no root, no compiler)
# make test     set up everything and run all tests (system packages too, if root or sudo allow)
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
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=10

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

.PHONY: start test lessons bench plumbing results lint
