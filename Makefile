# make start     set up and train a real model on real data over several ranks (no root, no compiler)
# make check     what to run before a commit: lint, form, engine (no root, no compiler)
# make test      set up everything (system packages too, if root or sudo allow) and run what guards a
#                change: every lesson once, and all that depends on what has changed
# make test-all  everything, twice as long and more; tests/passed.txt says what is green
# make gpu       on a machine with GPUs: the doctor, every lesson on 1, 2, 4 and 8 of them, the
#                benchmarks, into results/MACHINE. RANKS=1,8 ONLY=fsdp/ DEADLINE=SECONDS MACHINE=NAME
#                narrow it; PRETEND=4 pretends so many GPUs
# make lessons   run every lesson in reading order, one line each; ONLY=fsdp/ some of them
# make bench     every speed ratio this course states, ours next to the library's
# make site      the course as pages, to be opened as files: build/site/index.html
# Each may be run again at any time, after an interruption too. To a first installation one may add
#   PYTHON=python3.12     which Python to use (3.11 to 3.14)
#   TORCH_INDEX=ADDRESS   where to take torch from: an index of wheels for CPUs, say
#   SYSTEM_PACKAGES=no    never call apt-get; what needs such packages says BLOCKED

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export PYTHON TORCH TORCH_INDEX SYSTEM_PACKAGES

start: .venv/core
	@echo "=== What is here (the whole report: course doctor)"
	@$(BIN)/python -m course.doctor >.venv/doctor.log || { cat .venv/doctor.log; exit 1; }
	@grep -E "^  (✓|!|✗) |^ +-> " .venv/doctor.log
	@echo "  (What is marked ! is for later lessons, and can wait.)"
	@echo; echo "=== Training on several ranks: parallelism/01_data_parallelism_ddp.py"; echo
	@$(BIN)/python parallelism/01_data_parallelism_ddp.py >.venv/start.log || { cat .venv/start.log; exit 1; }
	@grep -E "^[0-9]+ ranks, |predicted +measured|by hand: accuracy| PASS, " .venv/start.log
	@echo; echo "The other rows come later: you will predict them first."
	@echo; echo "=== It works. Now, as README.md says:  . .venv/bin/activate; course predict fundamentals/02"

check: lint .venv/test
	$(BIN)/python -m pytest --tier=gate -n 2 --dist worksteal tests/form tests/engine

# tests/README.md says what runs when. WORKERS=3 keep two cores busy, since tests also wait.
test: .venv/all
	@$(BIN)/python -m tests.run gate

test-all passed: .venv/all
	@$(BIN)/python -m tests.run night

lessons: .venv/core
	$(BIN)/python -m course.run_lessons --only=$(ONLY)

bench: .venv/core
	$(BIN)/python -m benchmarks

# The pages have an environment of their own: Sphinx and awscli want different docutils.
site: .venv-site/made
	@.venv-site/bin/python site/pages.py build/pages
	@.venv-site/bin/sphinx-build -q -W -a --keep-going -j 2 -c site -d build/doctrees build/pages build/site
	@echo "Open build/site/index.html"

.venv-site/made: site/requirements.txt
	@$(PYTHON) -m venv .venv-site
	@.venv-site/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

# What its tests need besides: a Chromium, and axe-core, as a package of Python's brings it.
.venv-site/browser: .venv-site/made site/requirements-test.txt
	@.venv-site/bin/python -m pip install -q --disable-pip-version-check --no-deps -r site/requirements-test.txt
	@if sh site/browser.sh; then touch $@; fi

GPU_BOX = $(BIN)/python -m course.gpu_box --only=$(ONLY) $(if $(RANKS),--ranks=$(RANKS)) \
  $(if $(MACHINE),--machine=$(MACHINE)) $(if $(DEADLINE),--deadline=$(DEADLINE)) \
  $(if $(PRETEND),--pretend=$(PRETEND))
gpu: .venv/core
	@$(GPU_BOX) --plan
	$(if $(PRETEND),,@$(MAKE) --no-print-directory .venv/all)
	@$(GPU_BOX)

# For those who write lessons: the plumbing into every lesson, measured results into README.
plumbing: .venv/core
	$(BIN)/python -m course.write plumbing

results: $(if $(ONLY),.venv/core,.venv/all)
	$(BIN)/python -m course.run_lessons --keep --only=$(ONLY)
	$(if $(ONLY),,$(BIN)/python -m benchmarks --keep)
	$(BIN)/python -m course.write tables

# Ruff is all that this needs: the one in .venv, or one in an environment of its own.
RUFF := $(or $(wildcard $(BIN)/ruff),.venv-lint/bin/ruff)
lint: $(RUFF)
	$(RUFF) check .
	$(RUFF) format --check .

.venv-lint/bin/ruff:
	@$(PYTHON) -m venv .venv-lint
	@.venv-lint/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt ruff

.venv/made:
	@sh course/install.sh venv
	@touch $@

.venv/core: .venv/made pyproject.toml constraints.txt
	@sh course/install.sh core
	@touch $@

.venv/test: .venv/core
	@sh course/install.sh test
	@touch $@

.venv/all: .venv/test packages.txt
	@sh course/system_packages.sh
	@echo "=== DeepSpeed, FFCV, profiling tools, and a pretended AWS"
	@sh course/install.sh deepspeed,profiling,data,cloud
	@sh course/install.sh ffcv \
	  || echo "*** FFCV could not be built: its lessons will say BLOCKED. It needs the packages in packages.txt"
	@touch $@

.PHONY: start check test test-all passed gpu lessons bench site plumbing results lint
