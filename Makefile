# make quickstart   a real run in about a minute or two; make test   everything CI runs
# Uses the active virtual environment, or makes .venv.

PYTHON  ?= python3
VENV    := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.stretto-setup
PROTOC  := build/protoc-venv
RECIPE  ?= recipes/word-problems.toml
export OMP_NUM_THREADS ?= 1

.PHONY: setup quickstart test check format protos docs bench chaos up down clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/stretto run $(RECIPE)

test: setup
	$(BIN)/python -m pytest

# ---- style, types, layers, protos: seconds
check: setup $(PROTOC)/ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	PATH=$(PROTOC)/bin:$$PATH sh deploy/protos.sh build/protos
	diff -r build/protos/stretto/v1 stretto/v1 -x __pycache__ || { echo "stretto/v1 is stale: run make protos"; exit 1; }
	$(BIN)/pyright

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/buf format -w

# Generated with an old, pinned compiler: code from a newer one refuses to import beside the protobuf that vLLM brings.
$(PROTOC)/ready:
	$(PYTHON) -m venv $(PROTOC)
	$(PROTOC)/bin/python -m pip install --quiet --disable-pip-version-check 'grpcio-tools==1.76.0' 'mypy-protobuf==5.1.0' 'setuptools<81'
	touch $@

protos: setup $(PROTOC)/ready
	$(BIN)/buf format -w
	PATH=$(PROTOC)/bin:$$PATH sh deploy/protos.sh .

docs: setup
	$(BIN)/python -m stretto.reference > docs/recipe.md

bench: setup
	$(BIN)/python -m tests.bench.main

# MINUTES of faults on a small real run; the proofs, and what they cost, go to build/bench/chaos.json
chaos: setup
	$(BIN)/python -m tests.system.chaos --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0)

up:
	docker compose -f deploy/compose.yaml up --build --wait --scale rollout=$(or $(ROLLOUTS),1)

down:
	docker compose -f deploy/compose.yaml down --volumes

clean:
	rm -rf build runs .pytest_cache .ruff_cache .hypothesis
