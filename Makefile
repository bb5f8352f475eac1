# `make demo` and `make test` need Python 3.11+ and nothing else: no Docker, no cluster. (ssh-keygen is installed if need be.)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS ?= dev
JOBS   ?= 2
# Another package index for torch, for example one with CPU-only wheels: make install TORCH_INDEX=URL
TORCH_INDEX ?=
comma  := ,
DEMO   := MLBENCH_HOME=$(CURDIR)/demo $(BIN)/mlbench
STAMP  := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: help install demo test ssh lint bench images e2e clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install the project into it

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	test -z "$(TORCH_INDEX)" || $(BIN)/python -m pip install --quiet "torch>=2.11,<2.16" --index-url "$(TORCH_INDEX)"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip check
	touch $@

demo: install  ## train on 1 and 2 workers to the goal, verify both archives, draw the charts
	rm -rf demo
	$(DEMO) run demo 1 2 --task digits_resnet --yes
	$(DEMO) download demo-1 --output demo/demo-1.zip
	$(DEMO) download demo-2 --output demo/demo-2.zip
	$(DEMO) verify demo/demo-1.zip demo/demo-2.zip
	$(DEMO) charts demo/charts demo/demo-1.zip demo/demo-2.zip --yes

test: install lint ssh  ## lint, types and all tests that need no cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not cluster" -n $(JOBS) --dist loadfile

# Signatures are tried with the real program.
ssh:
	command -v ssh-keygen >/dev/null || { apt-get update -qq && apt-get install -qq --yes openssh-client; } \
	  || { echo "The tests need ssh-keygen: install OpenSSH's client." >&2; exit 1; }

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## every figure of README, measured side by side
	for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit; done

images: install  ## build the base image and one image per task
	sh task_images/build.sh

e2e: install  ## the whole story on a KIND cluster; TESTS=tests/e2e for all tests that need one
	sh tests/e2e/run.sh $(TESTS)

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo build dist
