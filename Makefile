# Everything runs in a virtual environment of its own per Python version, made on first use.
PYTHON ?= python3.11
PYTHON_312 ?= python3.12
LINE := $(shell $(PYTHON) -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
VENV := $(if $(filter 3.11,$(LINE)),.venv,.venv-$(LINE))
# 3.11 resolves to the older JAX line; every later Python takes the newer one.
CONSTRAINTS := constraints/$(if $(filter 3.11,$(LINE)),python-3.11.txt,python-3.12.txt)
BIN := $(VENV)/bin
EXTRAS := experiments,test
OPS := $(patsubst pallas_kernels/%/benchmark.py,%,$(wildcard pallas_kernels/*/benchmark.py))

.PHONY: demo test test-all lint types unit heavy docs aot aot-gpu measure device parity harness adapters keras-hub constraints clean

demo: $(VENV)/.installed
	$(BIN)/python -m kvjax_models.cli download smollm2-135m
	$(BIN)/python -m experiments.demo --verbosity=-2

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# Compiling, which is most of it, takes one core: two processes, a file of tests each at a time, in the order of their
# names, which puts the longest single test (experiments/test_compile) early.
unit: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not heavy"

heavy: $(VENV)/.installed
	$(BIN)/python -m pytest -m heavy

# Both JAX lines, the tests that take minutes, and the live comparison with the published implementations.
test-all:
	$(MAKE) test heavy PYTHON=$(PYTHON)
	$(MAKE) test heavy PYTHON=$(PYTHON_312)
	$(MAKE) parity harness adapters docs PYTHON=$(PYTHON)

# Kernels and decoding compiled for TPUs that are not here.
aot: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	$(BIN)/python -m experiments.compile

# The same for GPUs that are not here; their compiler takes 5 GB.
aot-gpu: $(VENV)/.installed $(VENV)/.installed-gpu-compiler
	PYTHONPATH=$(VENV)/gpu-compiler $(BIN)/python -m experiments.compile --device h200

# The kernels on this machine's device: right, and how fast. With a GPU: make measure EXTRAS=experiments,test,cuda
measure: $(VENV)/.installed
	$(BIN)/python -m pytest tests/pallas_kernels
	for op in $(OPS); do \
		$(BIN)/python -m pallas_kernels.$$op.benchmark --output build/kernels/$$op.json || exit 1; \
	done

# Kernels, latency and throughput on this machine's device, in half an hour; a second start runs the remaining steps.
device: $(VENV)/.installed
	$(BIN)/python -m experiments.device

# The site, in build/docs. It runs the tutorial, which needs a model.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m kvjax_models.cli download smollm2-135m
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --builder html docs build/docs

parity: $(VENV)/.installed-parity
	$(BIN)/python -m pytest tests/models/test_parity.py tests/models/test_generate_parity.py \
		tests/models/test_kvpress_parity.py tests/experiments/test_peers.py

# Beside lm-evaluation-harness's own model of transformers.
harness: $(VENV)/.installed-harness
	$(BIN)/python -m pytest tests/models/test_lm_eval.py

# Under other libraries' models, in environments of their own: they pin much. Each run skips the tests of the others.
adapters: $(VENV)/adapters/.installed $(VENV)/gemma/.installed $(VENV)/keras-hub/.installed
	PYTHONPATH=$(VENV)/gemma $(VENV)/adapters/bin/python -m pytest tests/adapters/test_tunix.py tests/adapters/test_gemma.py
	PYTHONPATH=$(VENV)/keras-hub KERAS_BACKEND=jax $(BIN)/python -m pytest tests/adapters/test_keras_hub.py

# Memory and time of keras-hub's models with its own cache and with compressed ones.
keras-hub: $(VENV)/keras-hub/.installed
	PYTHONPATH=$(VENV)/keras-hub KERAS_BACKEND=jax $(BIN)/python -m experiments.keras_hub_speed

$(VENV)/adapters/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)/adapters
	$(VENV)/adapters/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test,adapters]'
	touch $@

# Apart from the other packages, too, and without what it asks for.
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

$(VENV)/.installed-parity: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),parity]'
	touch $@

$(VENV)/.installed-harness: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),parity,harness]'
	touch $@

# Apart from the other packages: wherever JAX can import it, it looks for TPUs.
$(VENV)/.installed-tpu-compiler: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(CONSTRAINTS) --no-deps --target $(VENV)/tpu-compiler \
		"libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS),docs]'
	touch $@

# Of JAX's own version. Its CUDA has pins of its own: those of the parity extra's may be others.
$(VENV)/.installed-gpu-compiler: $(VENV)/.installed constraints/gpu-compiler.txt
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints/gpu-compiler.txt \
		--target $(VENV)/gpu-compiler "jax-cuda13-plugin[with-cuda]==$$(sed -n 's/^jaxlib==//p' $(CONSTRAINTS))"
	touch $@

# Writes the versions that the environment holds now, for after a change of dependencies in pyproject.toml. The older
# line's pins must hold the other extras, too: install them (make parity harness adapters docs) before.
constraints: $(VENV)/.installed $(VENV)/.installed-tpu-compiler
	(for path in $$($(BIN)/python -c 'import site; print(*site.getsitepackages())') $(VENV)/tpu-compiler \
		$(wildcard $(VENV)/adapters/lib/python*/site-packages); do \
		$(BIN)/python -m pip freeze --path $$path --exclude-editable --exclude kvjax; \
	done) | sed 's/+cpu//' | sort --ignore-case --unique > $(CONSTRAINTS)

clean:
	rm -rf .venv .venv-* build
