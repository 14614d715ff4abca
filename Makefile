# Each goal makes the environment that it needs in .venv on first use (about 5.5 GB: the CUDA build of torch).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU ?= t4
TORCH := torch==2.14.1 torchvision==0.29.1
# The other tested versions (oomproof.measure.versions); all run on Python 3.10 to 3.12.
VERSIONS ?= 2.4.1 2.6.0 2.11.0
PYTHONS ?= $(VERSIONS:%=$(CURDIR)/.venv-%/bin/python)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet

.PHONY: demo test check accuracy test-versions environment clean
.DELETE_ON_ERROR:

demo: environment
	$(BIN)/oomproof run --gpu $(GPU) -- examples/train_gpt2.py

test: environment
	$(BIN)/python -m pytest

check: environment
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit

# Writes the tables of docs/accuracy.md from benchmarks/accuracy/results.jsonl; needs nothing but Python.
accuracy:
	$(PYTHON) benchmarks/accuracy/render.py

# tests/phantom with other versions of torch: each gets an environment of its own (5 GB) with nothing but torch in it.
# Interpreters that are there already: make test-versions PYTHONS="a/bin/python b/bin/python"
test-versions: environment $(if $(filter file,$(origin PYTHONS)),$(VERSIONS:%=.venv-%/stamp))
	failed=; for python in $(PYTHONS); do \
	    echo "== $$python"; \
	    OOMPROOF_TEST_PYTHON=$$python $(BIN)/python -m pytest tests/phantom || failed="$$failed $$python"; \
	done; test -z "$$failed" || { echo "failed with:$$failed" >&2; exit 1; }

.venv-%/stamp:
	$(PYTHON) -m venv .venv-$*
	@echo "installing torch $* into .venv-$*, 5 GB; this happens once" >&2
	.venv-$*/bin/python -m pip install --disable-pip-version-check --no-input --quiet torch==$*
	touch $@

environment: $(VENV)/stamp

$(VENV)/stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and what the tests need into $(VENV), 5.5 GB; this happens once" >&2
	$(PIP) $(TORCH) transformers accelerate nvitop
	$(PIP) --no-deps peft torch-pruning torchao bitsandbytes lion-pytorch
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache
