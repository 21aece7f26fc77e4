# The commands of this checkout: set it up, try it, test it. `make` alone lists them.
# Run: make demo      (this first installs everything into .venv; to use your own venv: make test VENV=~/venv)
# Edit: PYTHON and VENV, here or on the command line.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PROCESSES ?= $(if $(ARGS),0,4)

# A venv of your own is used as it is. If VENV does not exist yet, make creates it.
OWN := $(and $(filter-out .venv,$(VENV)),$(wildcard $(VENV)/bin/python))
READY := $(if $(OWN),,$(VENV)/.ready)
TESTED := $(if $(OWN),,$(VENV)/.ready-for-tests)
RUN := $(abspath $(VENV))/bin/
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "More arguments: make demo ARGS='--epochs 3', make unit ARGS='-k data'"

venv: $(READY) ## Make .venv and install what training needs, in locked versions (once, about 5.8 GB)
venv-tests: $(TESTED) ## Add what the tests need to .venv (make test does this too)

demo: $(READY) ## Train Fashion-MNIST on two simulated nodes of this machine, about a minute (INSTALL=1: also its data)
	@PATH="$(RUN):$$PATH" bash train/demo.sh $(ARGS)

up: ; @docker/up.sh ## Train on two nodes in containers (NNODES=4 NPROC=2); INSTALL=1 installs a missing engine, as root
down: ; docker compose --profile '*' down --remove-orphans ## Remove the nodes' containers; runs/ and the image stay
image: ; @docker/image.sh ## Build the image and test it (TARGET=compile adds a compiler)
wheels: ; @docker/host/wheels.sh ## Fill docker/wheels through this machine's pip, for builds that reach no index
push: ; @docker/host/push.sh ## Push the image to REPOSITORY

slurm-local: ; @slurm/local.sh up ## Start a real Slurm of two nodes on this machine (root; NODES=3 CPUS=8)
slurm-local-down: ; @slurm/local.sh down ## Remove this Slurm

sbom: ## Write docker/sbom.json (CycloneDX) from the lock files; IMAGE=rankup:runtime adds sbom-image.json
	python3 docker/host/sbom.py > docker/sbom.json
	$(if $(IMAGE),python3 docker/host/sbom.py $(IMAGE) > docker/sbom-image.json)
audit: ; @PYTHON=$(PYTHON) docker/host/audit.sh ## Look for known vulnerabilities in the locked packages

test: lint types unit ## Run lint, types and all tests but those in containers, which CI also runs
check: lint types ## Run lint, types and the tests that start no process: under two minutes
	$(RUN)python -m pytest --pure --ignore tests/launchers --ignore tests/promises --ignore tests/commands $(ARGS)
site: $(TESTED) ; @VENV=$(VENV) site/site.sh $(ARGS) ## Build the site from the pages (ARGS=serve shows it)
lint: $(TESTED) ; $(RUN)ruff check . ## Run ruff: mistakes and import order
types: $(TESTED) ; $(RUN)mypy ## Run mypy, strict on rankup/ and train/
unit: $(TESTED) ## Run pytest in four processes (PROCESSES=2), or in one if ARGS selects tests
	$(RUN)python -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

engine: $(TESTED) ## Run pytest on a real container engine: build the image, start and kill containers (root)
	RANKUP_ENGINE=1 $(RUN)python -m pytest tests/launchers/compose tests/launchers/k8s $(ARGS)

soak: $(TESTED) ## Run the tests with random faults a hundred times each, and lose a rank at every place (hours)
	RANKUP_RUNS=100 $(RUN)python -m pytest --timeout 0 $(or $(ARGS),$(shell grep -rl RANKUP_RUNS tests --include="test_*.py"))

compare: $(TESTED) ; $(RUN)python bench/compare.py $(ARGS) ## Compare methods and launchers (ARGS: --only, settings)
doctor: $(READY) ; $(RUN)python -m train.main doctor $(ARGS) ## Check whether this machine can train (ARGS: settings)
race: $(TESTED) ## Race the tutorial's loop, Accelerate, Lightning and a loop tuned by hand (ARGS: --repeats 3)
	$(RUN)python bench/race.py $(ARGS)

k8s-kind k8s-minikube k8s-logs k8s-delete: ## Make a cluster and run a job in it (FILE=job): k8s/README.md
	@k8s/kube.sh $(@:k8s-%=%)

lock: $(READY) ; @docker/host/lock.sh $(RUN)uv && python3 docker/host/sbom.py > docker/sbom.json ## Update the lock files to the newest versions that pyproject.toml allows
horovod: $(READY) ; @docker/horovod.sh $(RUN)python ## Build Horovod (once) and install it: train/parallel/horovod.md

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

.PHONY: check site sbom audit venv-tests doctor k8s-kind k8s-minikube k8s-logs k8s-delete horovod slurm-local slurm-local-down engine help venv demo up down image wheels push test lint types unit soak race lock clean
