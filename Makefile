# Each version of Python has its own virtual environment, which is created on first use.
PYTHON ?= python3.11
PYTHON_312 ?= python3.12
LINE := $(shell $(PYTHON) -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
VENV := $(if $(filter 3.11,$(LINE)),.venv,.venv-$(LINE))
# Python 3.11 uses JAX 0.10; later versions of Python use JAX 0.12.
CONSTRAINTS := constraints/$(if $(filter 3.11,$(LINE)),python-3.11.txt,python-3.12.txt)
BIN := $(VENV)/bin
EXTRAS := experiments,test

.PHONY: demo test test-all lint types unit heavy docs aot aot-gpu measure device rehearse rehearsal parity harness adapters \
	constraints clean

demo: $(VENV)/.installed
	$(BIN)/python -m kvjax_models.cli download smollm2-135m
	$(BIN)/python -m experiments.demo --verbosity=-2

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# Compilation dominates and uses one core, so two processes run. Each runs one file at a time; the alphabetical order
# starts the longest test (experiments/test_compile) early.
unit: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not heavy"

heavy: $(VENV)/.installed
	$(BIN)/python -m kvjax_models.cli download smollm2-135m
	$(BIN)/python -m pytest -m heavy

# All tests with both versions of JAX, including slow ones and live comparisons with published implementations.
test-all:
	$(MAKE) test heavy PYTHON=$(PYTHON)
	$(MAKE) test heavy PYTHON=$(PYTHON_312)
	$(MAKE) parity harness adapters docs PYTHON=$(PYTHON)
	$(MAKE) rehearse

# Compiles kernels and decoding for TPUs, without a TPU.
aot: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	$(BIN)/python -m experiments.compile

# Compiles kernels and decoding for GPUs, without a GPU. The compiler needs 5 GB of disk space.
aot-gpu: $(VENV)/.installed $(VENV)/.installed-gpu-compiler
	PYTHONPATH=$(VENV)/gpu-compiler $(BIN)/python -m experiments.compile --device h200

# Tests and benchmarks the kernels on this machine's device. With a GPU: make measure EXTRAS=experiments,test,cuda
measure: $(VENV)/.installed
	$(BIN)/python -m pytest tests/pallas_kernels
	$(BIN)/python -m pallas_kernels.benchmark_all --output build/kernels.jsonl

# Measures kernels, decode steps and memory on this machine's device in eight minutes. A GPU machine that has JAX needs
# no make: PYTHONPATH=models python3 -m experiments.device --output_dir OUT
device: $(VENV)/.installed
	$(BIN)/python -m experiments.device

# Checks the plan of `device` without a GPU, with the JAX that GPU machines have: runs it with small sizes, and compiles
# all its programs, and a decode step of every policy, for a GPU. The compiler needs 5 GB of disk space.
rehearse:
	$(MAKE) rehearsal PYTHON=$(PYTHON_312) VENV=.venv-0.11 CONSTRAINTS=constraints/jax-0.11.txt

rehearsal: $(VENV)/.installed $(VENV)/.installed-gpu-compiler
	$(BIN)/python -m experiments.device --quick true --seconds 1000 --output_dir build/rehearsal
	PYTHONPATH=$(VENV)/gpu-compiler $(BIN)/python -m experiments.compile_plan
	$(BIN)/python -m pytest -m heavy tests/kvjax/test_policies.py -k lower_for_a_hopper_gpu

# Builds the site in build/docs. It runs the tutorial, which needs a model.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m kvjax_models.cli download smollm2-135m
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --builder html docs build/docs

# Compares models with transformers and policies with kvpress, which needs an older transformers.
parity: $(VENV)/parity/.installed $(VENV)/.installed-kvpress
	$(VENV)/parity/bin/python -m pytest tests/models/test_parity.py tests/models/test_generate_parity.py \
		tests/models/test_known_model_parity.py
	$(BIN)/python -m pytest tests/models/test_kvpress_parity.py tests/experiments/test_peers.py

# Compares with lm-evaluation-harness's own transformers model.
harness: $(VENV)/.installed-harness
	$(BIN)/python -m pytest tests/models/test_lm_eval.py

# Tests with models of other libraries, in separate environments, because these libraries pin many versions.
adapters: $(VENV)/adapters/.installed $(VENV)/gemma/.installed $(VENV)/keras-hub/.installed
	PYTHONPATH=$(VENV)/gemma $(VENV)/adapters/bin/python -m pytest tests/adapters/test_tunix.py \
		tests/adapters/test_gemma.py
	PYTHONPATH=$(VENV)/keras-hub KERAS_BACKEND=jax $(BIN)/python -m pytest tests/adapters/test_keras_hub.py

$(VENV)/adapters/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)/adapters
	$(VENV)/adapters/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test,adapters]'
	touch $@

# gemma and keras-hub are in separate directories, without their dependencies.
$(VENV)/gemma/.installed: constraints/gemma.txt $(VENV)/adapters/.installed
	$(VENV)/adapters/bin/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/gemma --requirement $<
	touch $@

$(VENV)/keras-hub/.installed: constraints/keras-hub.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/keras-hub --requirement $<
	touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/parity/.installed: pyproject.toml constraints/parity.txt
	$(PYTHON) -m venv $(VENV)/parity
	$(VENV)/parity/bin/python -m pip install --quiet --constraint constraints/parity.txt --editable '.[$(EXTRAS),parity]'
	touch $@

$(VENV)/.installed-kvpress: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),kvpress]'
	touch $@

$(VENV)/.installed-harness: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),kvpress,harness]'
	touch $@

# In a separate directory, because JAX searches for TPUs whenever it can import libtpu.
$(VENV)/.installed-tpu-compiler: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(CONSTRAINTS) --no-deps --target $(VENV)/tpu-compiler \
		"libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),docs]'
	touch $@

# The plugin has the version of jaxlib. Its CUDA packages have separate pins, because the parity extra may need others.
$(VENV)/.installed-gpu-compiler: $(VENV)/.installed constraints/gpu-compiler.txt
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints/gpu-compiler.txt \
		--target $(VENV)/gpu-compiler "jax-cuda13-plugin[with-cuda]==$$(sed -n 's/^jaxlib==//p' $(CONSTRAINTS))"
	touch $@

# Writes the installed versions as constraints. Run it after the dependencies in pyproject.toml have changed. The
# constraints of Python 3.11 include those of all extras; install them first (make parity harness adapters docs).
constraints: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	(for path in $$($(BIN)/python -c 'import site; print(*site.getsitepackages())') $(VENV)/tpu-compiler \
		$(wildcard $(VENV)/adapters/lib/python*/site-packages); do \
		$(BIN)/python -m pip freeze --path $$path --exclude-editable --exclude kvjax; \
	done) | sed 's/+cpu//' | sort --ignore-case --unique > $(CONSTRAINTS)
	[ ! -e $(VENV)/parity/.installed ] || $(VENV)/parity/bin/python -m pip freeze --exclude-editable --exclude kvjax \
		| sed 's/+cpu//' | sort --ignore-case > constraints/parity.txt

clean:
	rm -rf .venv .venv-* build
