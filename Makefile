# Each target makes the environment first when it is missing or older than constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup repro studies profile smoke test test-serving lint ui clean

# The first interpreter that is new enough; choose another with `make PYTHON=/path/to/python setup`.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
NAME ?= default
PORT ?= 5000
READY := .venv/.ready

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create the environment in .venv (every other target does it too)

# torch first and alone: it is by far the largest, and pip then resolves the rest against it.
$(READY): constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found: install one, or name it with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	touch $@

repro: $(READY) ## Run the pipeline of params.yaml, from the target to reports/index.html
	dvc repro
	dvc metrics show
	@echo "The report is reports/index.html; 'make ui' shows every run."

studies: $(READY) ## Train the variants of the ablation and of the scaling study, and add them to the report
	dvc repro
	dvc repro experiments/studies/dvc.yaml
	python experiments/report.py

profile: $(READY) ## Overwrite params.yaml with a profile: make profile NAME=full
	python experiments/apply_profile.py $(NAME)

# A copy of the tree as it is now, with its own git, DVC cache, MLflow database and results.
smoke: $(READY) ## Run the whole pipeline in minutes, in a workspace of its own (.smoke)
	rm -rf .smoke && mkdir .smoke
	git ls-files -z --cached --others --exclude-standard -- . ':!dvc.lock' ':!reports' \
		| tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory=.smoke
	cd .smoke && git init --quiet && git add --all \
		&& git -c user.name=smoke -c user.email=smoke@localhost commit --quiet --message=smoke
	cd .smoke && python experiments/apply_profile.py smoke && dvc repro && dvc metrics show
	@echo "The smoke report is .smoke/reports/index.html"

test: lint ## Style, types and tests (not those marked slow, serving or gpu)
	OMP_NUM_THREADS=1 pytest -q -n 2

# Each engine has an environment of its own, for these tests alone: no profile names them. torchvision's CUDA
# build needs two operators that a CPU build of torch lacks; the line in site-packages declares them
# (tests/serving/cpu_stand_in).
.venv-test-sglang/.ready: tests/serving/requirements-sglang.txt
	$(PYTHON) -m venv .venv-test-sglang
	.venv-test-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-test-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	.venv-test-sglang/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	cp tests/serving/cpu_stand_in/torchvision_schemas.py .venv-test-sglang/lib/python3*/site-packages/
	echo 'import torchvision_schemas' > "$$(echo .venv-test-sglang/lib/python3*/site-packages)/torchvision_schemas.pth"
	touch $@

.venv-test-vllm/.ready: tests/serving/requirements-vllm.txt
	$(PYTHON) -m venv .venv-test-vllm
	.venv-test-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.venv-test-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-serving: $(READY) .venv-test-sglang/.ready .venv-test-vllm/.ready ## Tests against real SGLang and vLLM servers on the CPU (their environments: 7 GB)
	test -f models/drafts/eagle3/model.safetensors || test -f .smoke/models/drafts/eagle3/model.safetensors || $(MAKE) smoke
	OMP_NUM_THREADS=1 pytest -q -m serving tests/serving

lint: $(READY) ## Style and types only
	ruff check
	ruff format --check
	mypy

ui: $(READY) ## Open the MLflow user interface on PORT (5000)
	python experiments/ui.py --port $(PORT)

clean: ## Remove caches and the smoke workspace; keeps data, models, reports and runs
	rm -rf .smoke dvc_plots .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
