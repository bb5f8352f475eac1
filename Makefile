# `make demo` and `make test` need Python 3.11+ and nothing else: no Docker, no cluster. (ssh-keygen is installed if need be.)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS ?= dev
# Most tests wait for processes and sockets, so there are more workers than cores. Each collects all tests, which takes
# 10 s of a core and 1 GB.
JOBS   ?= $(shell expr 3 + $$(getconf _NPROCESSORS_ONLN))
# What needs no cluster. After each change the first line of defense runs, in CI also the second, and some tests at night.
ALL     = not cluster and not nightly
MARKS  ?= $(ALL) and not slow
# In a time zone of half hours: users are not in UTC, and machines of CI are.
TESTED  = TZ=Asia/Kolkata OMP_NUM_THREADS=1
WORKERS = -n $(JOBS) --dist loadfile
PYTEST  = $(TESTED) $(BIN)/python -m pytest $(WORKERS)
# Another package index for torch, for example one with CPU-only wheels: make install TORCH_INDEX=URL
TORCH_INDEX ?=
# Versions to install, for example those that CI has: make install CONSTRAINTS=requirements-ci.txt
CONSTRAINTS ?=
PIP    := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
LOWEST ?= .venv-lowest
comma  := ,
DEMO   := MLBENCH_HOME=$(CURDIR)/demo $(BIN)/mlbench
STAMP  := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: help install demo test test-slow test-tensorflow test-again test-nightly test-lowest test-busy ssh browser actionlint shellcheck lint docs dist release-rehearsal installs audit sbom addresses lock coverage bugs size bench gpu images publish-images e2e e2e-machines clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install the project into it

# The first edition was installed as "mlbench"; both distributions own the same command.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip uninstall --quiet --yes mlbench 2>/dev/null
	test -z "$(TORCH_INDEX)" || $(PIP) "torch>=2.11,<2.16" --index-url "$(TORCH_INDEX)"
	$(PIP) --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip check
	touch $@

# Tools of single targets, added to the environment that is already there.
$(VENV)/.tools-%: pyproject.toml | $(STAMP)
	$(PIP) --editable ".[$*]"
	touch $@

demo: install  ## train on 1 and 2 workers to the goal, verify both archives, draw the charts
	rm -rf demo
	$(DEMO) run demo 1 2 --task digits_resnet --yes
	$(DEMO) download demo-1 --output demo/demo-1.zip
	$(DEMO) download demo-2 --output demo/demo-2.zip
	$(DEMO) verify demo/demo-1.zip demo/demo-2.zip
	$(DEMO) charts demo/charts demo/demo-1.zip demo/demo-2.zip --yes

test: install lint ssh browser actionlint shellcheck  ## lint, types and the tests to run after each change
	$(PYTEST) -m "$(MARKS)"

test-slow: install ssh browser  ## the other tests that need no cluster: more engines, kills, trainings, ranks, screens
	$(PYTEST) -m "$(ALL) and slow"

test-tensorflow: $(VENV)/.tools-tensorflow  ## the task and the collectives in TensorFlow, which is installed for it (1.2 GB)
	$(PYTEST) -m "$(ALL)" tests/contract/task_images/cifar10_resnet20_tensorflow tests/contract/task_images/allreduce/test_tensorflow.py

test-again:  ## those that failed last time, one after another: a test that passes now is a flake, to be mended
	$(TESTED) $(BIN)/python -m pytest -m "$(ALL)" -v --last-failed --last-failed-no-failures none

# Signatures are tried with the real program.
ssh:
	command -v ssh-keygen >/dev/null || { apt-get update -qq && apt-get install -qq --yes openssh-client; } \
	  || { echo "The tests need ssh-keygen: install OpenSSH's client." >&2; exit 1; }

# Pages are looked at with a real browser; without one their tests are skipped, and say so.
browser:
	command -v chromedriver >/dev/null \
	  || { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium chromium-driver; } \
	  || echo "No browser could be installed: the tests of pages are skipped." >&2

# Workflows are linted by a program in Go, which has no package for pip that brings its binary.
actionlint: install
	command -v actionlint >/dev/null || test -x $(BIN)/actionlint \
	  || GOBIN=$(abspath $(BIN)) go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 \
	  || echo "Go could not build actionlint: the test of workflows is skipped." >&2

shellcheck:
	command -v shellcheck >/dev/null || { apt-get update -qq && apt-get install -qq --yes shellcheck; } \
	  || echo "ShellCheck could not be installed: the test of the templates' scripts is skipped." >&2

test-nightly:  ## all tests that need no cluster, with new inputs for the property tests
	MLBENCH_TEST_INPUTS=new $(MAKE) test MARKS="not cluster"

test-lowest: $(VENV)/.tools-lock ssh browser  ## the tests with the lowest allowed version of every dependency
	$(BIN)/uv venv --quiet --seed --allow-existing --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST) --resolution lowest-direct --editable ".[$(EXTRAS)]"
	$(TESTED) $(LOWEST)/bin/python -m pytest -m "$(ALL)" $(WORKERS) $(TESTS)

test-busy: install ssh browser actionlint shellcheck  ## the tests, beside a program that burns CPU on each core
	@for core in $$(seq "$$(getconf _NPROCESSORS_ONLN)"); do $(BIN)/python -c "while True: pass" & pids="$$pids $$!"; done; \
	trap 'kill $$pids' EXIT; trap 'exit 130' INT TERM; \
	$(PYTEST) -m "$(ALL)" $(TESTS)

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install  ## build the documentation into build/site, strictly, with links checked
	$(BIN)/python -m tools.build_docs

dist: $(VENV)/.tools-dist  ## build wheel and source distribution into dist, and check both (IMAGES=FILE: its images by digest)
	rm -rf dist
	$(BIN)/python -m tools.release --commit "$$(git rev-parse HEAD)" $(if $(IMAGES),--images "$(IMAGES)")
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m tools.release --clean
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tools.check_dist dist

release-rehearsal: $(VENV)/.tools-dist  ## all of a release that needs no network: build, sign, install, use (KIND=1: images, too)
	$(BIN)/python -m tools.rehearse_release $(if $(KIND),--kind)

installs: install  ## install the wheel by pip, pipx and uv, each into a fresh folder, and use what they have installed
	$(BIN)/python -m tools.check_installs

audit: $(VENV)/.tools-audit  ## look up the pinned packages of CI in the database of known vulnerabilities
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement requirements-ci.txt

sbom: $(VENV)/.tools-audit  ## list the pinned packages as a CycloneDX bill of materials in build/sbom.json
	mkdir -p build
	$(BIN)/pip-audit --disable-pip --no-deps --requirement requirements-ci.txt --format cyclonedx-json --output build/sbom.json

addresses: install  ## ask every address that data sets are fetched from, and compare sizes and digests
	$(BIN)/python -m tools.check_addresses

lock: $(VENV)/.tools-lock  ## update requirements-ci.txt, the versions that CI installs
	$(BIN)/uv pip compile --quiet --upgrade --universal --no-header --no-emit-package mlbench-cli --extra dev \
	  --extra dist --extra audit --extra tensorflow --python-version 3.11 --output-file requirements-ci.txt pyproject.toml

coverage: install ssh browser  ## tests with branches counted, in all their processes; names what none reaches (an hour)
	rm -rf build/coverage && mkdir -p build/coverage
	$(TESTED) $(BIN)/python -m coverage run -m pytest -m "not cluster" $(WORKERS) $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

bugs: install  ## put each bug of tests/bugs into the product, and see whether the tests find it (BUGS: names)
	$(BIN)/python -m tests.bugs $(BUGS)

size: install  ## lines by package, commands, options of run, and words of the documentation
	$(BIN)/python -m tools.size

bench: install  ## every figure of docs/development/figures.md, measured side by side; says what each needs, and prepares it
	$(BIN)/python -m tools.bench

gpu: install  ## what this machine's GPU does, in ten minutes at most; every line is kept as soon as it is known (GPU=build/gpu)
	$(BIN)/python -m benchmarks.gpu --output $(or $(GPU),build/gpu)

images: install  ## build the base image and one image per task, as KIND clusters load them
	sh task_images/build.sh

publish-images: install  ## build all images of tasks and push them: REGISTRY=ghcr.io/me PLATFORM=linux/amd64,linux/arm64
	test -n "$(REGISTRY)" || { echo "publish-images: name a registry of yours, REGISTRY=ghcr.io/me" >&2; exit 2; }
	$(BIN)/mlbench images push --registry "$(REGISTRY)" $(if $(PLATFORM),--platform "$(PLATFORM)") \
	  $(if $(IMAGES),-o json >"$(IMAGES)")

e2e: install  ## the whole story on a KIND cluster; TESTS=tests/e2e for all tests that need one
	sh tests/e2e/run.sh $(TESTS)

e2e-machines: install  ## runs on a real Slurm and real hosts with sshd, all on this machine, as root (MACHINES: others)
	sh tests/e2e/machines/run.sh $(TESTS)

clean:  ## remove the environments and what tools left behind
	rm -rf $(VENV) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo build dist
