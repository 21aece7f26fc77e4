# What can be done here: set up, try it, test it. `make` alone lists it.
# Run: make demo      (everything is installed into .venv first; a venv of your own: make test VENV=~/venv)
# Edit: PYTHON and VENV, here or behind the command.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PROCESSES ?= $(if $(ARGS),0,4)

# A venv of your own is used as it is; one that does not exist yet is made.
OWN := $(and $(filter-out .venv,$(VENV)),$(wildcard $(VENV)/bin/python))
READY := $(if $(OWN),,$(VENV)/.ready)
TESTED := $(if $(OWN),,$(VENV)/.ready-for-tests)
RUN := $(abspath $(VENV))/bin/
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "More arguments: make demo ARGS='--epochs 3', make unit ARGS='-k data'"

venv: $(READY) ## Make .venv and install what training needs, in locked versions (once, about 5.8 GB)
venv-tests: $(TESTED) ## Add what the tests need to .venv (make test does so)

demo: $(READY) ## Train Fashion-MNIST on two simulated nodes of this machine, about a minute
	@PATH="$(RUN):$$PATH" bash train/demo.sh $(ARGS)

up: ; @docker/up.sh ## Train on two containers as nodes (NNODES=4 NPROC=2); on a bare machine root installs the engine
down: ; docker compose --profile '*' down --remove-orphans ## Remove the nodes' containers; runs/ and the image stay
image: ; @docker/image.sh ## Build the image and try it (TARGET=compile: with a compiler inside)
wheels: ; @docker/host/wheels.sh ## Fill docker/wheels through this machine's pip, for builds that reach no index
push: ; @docker/host/push.sh ## Push the image to REPOSITORY

slurm-local: ; @slurm/local.sh up ## Start a real Slurm of two nodes on this machine (root; NODES=3 CPUS=8)
slurm-local-down: ; @slurm/local.sh down ## Remove it again

sbom: ## Write docker/sbom.json from the lock files (CycloneDX), and of an image sbom-image.json (IMAGE=rankup:runtime)
	python3 docker/host/sbom.py > docker/sbom.json
	$(if $(IMAGE),python3 docker/host/sbom.py $(IMAGE) > docker/sbom-image.json)
audit: ; @PYTHON=$(PYTHON) docker/host/audit.sh ## Look for known vulnerabilities of the locked packages

test: lint types unit ## All checks: lint, types, tests. This is what CI runs
check: lint types ## Lint, types and the tests that start no process: under two minutes
	$(RUN)python -m pytest --pure --ignore tests/launchers --ignore tests/promises --ignore tests/commands $(ARGS)
lint: $(TESTED) ; $(RUN)ruff check . ## ruff: mistakes and import order
types: $(TESTED) ; $(RUN)mypy ## mypy, strict on rankup/ and train/
unit: $(TESTED) ## pytest, in four processes (PROCESSES=2), or in one where ARGS selects tests
	$(RUN)python -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

engine: $(TESTED) ## pytest on a real container engine: builds the image, starts and kills containers (root)
	RANKUP_ENGINE=1 $(RUN)python -m pytest tests/launchers/compose tests/launchers/k8s $(ARGS)

soak: $(TESTED) ## The tests with random faults, a hundred runs of each, and a rank lost at every place (hours)
	RANKUP_RUNS=100 $(RUN)python -m pytest --timeout 0 $(or $(ARGS),$(shell grep -rl RANKUP_RUNS tests --include="test_*.py"))

compare: $(TESTED) ; $(RUN)python tests/bench/compare.py $(ARGS) ## Methods and launchers side by side (ARGS: --only, settings)
doctor: $(READY) ; $(RUN)python -m train.main doctor $(ARGS) ## Is this machine fit to train? (ARGS: settings)
race: $(TESTED) ## Race the tutorial's loop, Accelerate, Lightning and a loop tuned by hand (ARGS: --repeats 3)
	$(RUN)python tests/bench/race.py $(ARGS)

k8s-kind k8s-minikube k8s-render k8s-logs k8s-delete: ## A cluster and a job in it (FILE=job): k8s/README.md
	@k8s/kube.sh $(@:k8s-%=%)

lock: $(READY) ; @docker/host/lock.sh $(RUN)uv && python3 docker/host/sbom.py > docker/sbom.json ## Write the lock files anew: the newest versions that pyproject.toml allows
horovod: $(READY) ; @docker/horovod.sh $(RUN)python ## Build Horovod, once, and install it: train/parallel/horovod.md

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

INSTALL = docker/host/install.sh $(VENV)
$(VENV)/.ready: docker/requirements.lock docker/host/install.sh docker/host/locked.sh pyproject.toml
	@$(INSTALL) training $(PYTHON)
	@touch $@
$(VENV)/.ready-for-tests: $(VENV)/.ready docker/requirements-test.lock tests/rigs/skypilot.txt
	@$(INSTALL) tests $(PYTHON)
	@touch $@

.PHONY: check sbom audit venv-tests doctor k8s-kind k8s-minikube k8s-render k8s-logs k8s-delete horovod slurm-local slurm-local-down engine help venv demo up down image wheels push test lint types unit soak race lock clean
