# The first command needs Linux on x86-64, Python 3.11 and make; all else comes from `make setup`.
#   make demo         start the quickstart and watch it learn
#   make test         all tests but the long ones        make test-all    the long ones, file by file
#   make lint         style, types, rooms, shape         make bench       measure
#   make setup LIST=gpu   the CUDA packages instead of the CPU ones
#   make setup LIST=sglang   beside the main environment: that of the SGLang engine's own processes
#   make setup LIST=agents   likewise: agent harnesses, unmodified, that tests of the gateway start
#   make lock             renew requirements/*.txt       (UPGRADE=--upgrade takes newer versions)

BIN := .venv/bin
LIST ?= cpu
STAMP := .venv$(if $(filter sglang agents,$(LIST)),-$(LIST))/.set-up-$(LIST)
PACKAGES := asyncrl benchmarks configs learner recipes research rollout_service weight_sync
ARGS ?=
WORKERS ?= 3
# A test that outlasts even its time limit ends the run, and so does one that ends its worker: its name and the
# stacks of its threads are printed.
HANGS_S := 660
HANGS := -p tests.hangs -o faulthandler_timeout=$(HANGS_S) -o faulthandler_exit_on_timeout=true --max-worker-restart 0
UPGRADE ?=
# Else each of the hundreds of processes of the tests, and of a run, compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all lint format bench lock
.NOTPARALLEL:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): requirements/$(LIST).txt requirements/uv.txt pyproject.toml tools/set_up.py
	@for python in $(PYTHON) python3.11 python3 python; do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	        exec "$$python" tools/set_up.py $(LIST); \
	    fi; \
	done; \
	echo "asyncrl needs Python 3.11 with its venv module on the PATH; install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	exit 1

demo: $(STAMP)
	$(BIN)/asyncrl up configs/quickstart.yaml $(ARGS)
	@echo "Where to look next:"
	@echo "  runs/quickstart/curves.png                      reward, lag, entropy and throughput over the steps"
	@echo "  $(BIN)/asyncrl inspect rollouts quickstart --worst    answers token by token: log-probs, versions"
	@echo "  $(BIN)/asyncrl export runs/quickstart --step best     the best checkpoint as Hugging Face weights"
	@echo "  $(BIN)/asyncrl status                           in another terminal, while a run lives: its page and state"
	@echo "  docs/your-own                                   your own data, reward, model, agent and project"

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(HANGS) --durations=15 $(ARGS)

test-all: $(STAMP)
	$(BIN)/python tools/test_all.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/shape.py $(PACKAGES) tools tests
	$(BIN)/python tools/untyped.py
	$(BIN)/python tools/pickles.py $(filter-out benchmarks recipes research,$(PACKAGES)) tools

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/asyncrl bench pipeline $(ARGS)

lock: $(STAMP)
	$(BIN)/python tools/lock.py $(UPGRADE)
