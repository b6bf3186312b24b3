# Every target sets up what it needs in .venv, once, and again when the sources have changed:
#     make demo     shows what penstock does; installs only what that takes
#     make picture  the picture of the front page, measured here
#     make test     the tests, against the built wheel, in as many processes as there are cores (JOBS=1: in one)
#     make soak     the tests that are not worth their time on every change, for at most an hour
#     make lint     ruff and mypy
#     make site     the documentation, in build/site; warnings are errors
#     make check    the fast tests of what you have changed, from the sources, and lint: in under a minute
#     make faults   the planted faults, each of which a test must see; PART=1/3: a third of them
#     make mutants  faults that mutmut makes up in what you have changed (or FILES=), and which of them its tests (or TESTS=) do not see
#     make dist     the wheel
#     make release  the wheel and the source distribution, checked as a package index would
#
# The fast tests with other versions than constraints.txt names, in a folder of their own below build/:
#     make versions PYTHON=python3.14                            # the newest torch
#     make versions PYTHON=python3.11 TORCH=2.6.0 NUMPY=1.26.4   # without the object store, whose packages want newer ones
#     make versions PYTHON=python3.13t TORCH=2.12.0              # free-threaded: inline and in threads, without the formats
#
# A machine with an accelerator and no network, with the torch and the NumPy that its Python has. The first line, where there is a
# network, fills the folder that the second needs; build/gpu.json gets the figures of examples/benchmarks/device.py:
#     make wheels WHEELS=folder PYTHON_VERSION=3.12
#     make gpu WHEELS=folder PYTHON=python3
# Such a machine also runs examples/benchmarks/known_runs.py, beside other loaders, in 6 minutes; build/known_runs.json gets the figures:
#     make wheels WHEELS=folder PYTHON_VERSION=3.12 PEERS=1
#     make known WHEELS=folder PYTHON=python3 RUNS='--workers 8,14'

PYTHON ?= python3
PYTEST_ARGS ?=
PART ?= 1/1
JOBS ?= $(shell nproc)
TORCH ?=
NUMPY ?=
TAG ?=
EXTRAS ?= formats,lightning,transformers
DEPENDENCY_GROUPS ?= test s3 docs site ray
CONSTRAINTS ?= constraints.txt
WHEELS ?= build/wheels
PYTHON_VERSION ?= 3.12
FILES ?=
TESTS ?=
FIGURES ?= build/gpu.json
KNOWN ?= build/known_runs.json
RUNS ?=
# 1: make wheels takes the loaders of make known, too.
PEERS ?=
# 1: go on without an accelerator, as far as that goes.
ANYWAY ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := $(shell find pipes -not -path '*__pycache__*') README.md LICENSE
# What the tests marked gpu import besides torch and NumPy, and what that needs: penstock itself is taken from pipes/.
GPU_PACKAGES := iniconfig packaging pluggy psutil pygments pytest pytest-timeout torchdata
# What known_runs.py compares with, and what that needs: Grain and SPDL. Hugging Face datasets and OLMo-core are used if PYTHON has them.
PEER_PACKAGES := absl-py array-record cloudpickle etils fsspec grain importlib-resources pillow portpicker protobuf psutil spdl spdl-core spdl-io torchdata \
    typing-extensions zipp

.PHONY: demo picture test soak lint check faults mutants site dist release versions wheels gpu known clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# The picture of docs/index.md, measured on this machine.
picture: $(VENV)/.demo
	$(BIN)/python examples/demo.py --picture docs/_static

# The packages are installed without bytecode. A test that starts an interpreter would compile torch in it, which takes as long as to import it.
test soak check: export PYTHONDONTWRITEBYTECODE :=

# The tests run against the installed wheel: `pipes/` is not on the import path.
test: $(VENV)/.installed
	PYTHONPATH= $(BIN)/pytest $(if $(filter-out 1,$(JOBS)),--numprocesses $(JOBS) --dist worksteal) $(PYTEST_ARGS)

soak: export PENSTOCK_REPEATS ?= 10
soak: $(VENV)/.installed
	PYTHONPATH= $(BIN)/pytest --soak --session-timeout 3600 --durations 20 \
	    $(if $(filter-out 1,$(JOBS)),--numprocesses $(JOBS) --dist worksteal) $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

site: $(VENV)/.installed
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/site
	@echo 'The front page is build/site/index.html.'

check: $(VENV)/.tools
	$(BIN)/python tests/project/check.py

faults: $(VENV)/.installed
	PYTHONPATH= $(BIN)/python tests/project/mutations.py --part $(PART)

mutants: $(VENV)/.mutants
	PYTHONPATH= $(BIN)/python tests/project/mutants.py $(FILES) $(if $(TESTS),--tests $(TESTS))

versions: PYTHON_HERE = $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2] + sys.abiflags)')
versions: THREADED = $(if $(filter %t,$(PYTHON_HERE)),-k "not process and not fork and not spawn and not kill" --ignore tests/laws/test_data.py \
    $(addprefix tests/,fetch laws loader memory nodes observe random))
versions: PYARROW = $(if $(filter 1.%,$(NUMPY)),pyarrow==21.0.0) # later ones want NumPy 2
versions: PLACE = build/python-$(PYTHON_HERE)-torch-$(or $(TORCH),newest)$(if $(NUMPY),-numpy-$(NUMPY))
versions:
	mkdir -p build
	grep -Ev '^(torch|sympy$(if $(THREADED),|hypothesis)$(if $(NUMPY),|numpy|pandas|pyarrow|datasets|fsspec|dill|multiprocess|huggingface_hub))==' constraints.txt > $(PLACE).txt
	for pin in $(TORCH:%=torch==%) $(NUMPY:%=numpy==%) $(PYARROW) $(if $(THREADED),hypothesis==6.139.3); do echo $$pin; done >> $(PLACE).txt
	$(MAKE) test VENV=$(PLACE) CONSTRAINTS=$(PLACE).txt EXTRAS=$(if $(THREADED),,formats) \
	    DEPENDENCY_GROUPS='$(if $(THREADED),free-threaded,test$(if $(NUMPY),, s3))' PYTEST_ARGS='-m "not slow" $(THREADED) $(PYTEST_ARGS)'

wheels:
	"$(PYTHON)" -m pip --disable-pip-version-check download --only-binary=:all: --no-deps --constraint constraints.txt \
	    --python-version $(PYTHON_VERSION) --dest "$(WHEELS)" $(sort $(GPU_PACKAGES) $(if $(PEERS),$(PEER_PACKAGES)))

define beside
rm -rf build/gpu
"$(PYTHON)" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile --target build/gpu "$(WHEELS)"/*.whl
endef

# Nothing is installed into PYTHON: what it lacks lies beside it, in build/gpu.
gpu known: export PYTHONPATH := $(abspath build/gpu):$(abspath pipes)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:
	@"$(PYTHON)" -c 'import sys, numpy, torch; sys.exit(None if torch.accelerator.is_available() or "$(ANYWAY)" else "torch " + torch.__version__ \
	    + " of $(PYTHON) sees no accelerator. make gpu ANYWAY=1 goes on, and tries all but what needs one.")'
	$(beside)
	rm -f "$(FIGURES)"
	"$(PYTHON)" -m pytest -m gpu -rs $(PYTEST_ARGS) $$(grep -rl --include='test_*.py' 'mark\.gpu\b' tests); failed=$$?; \
	    "$(PYTHON)" examples/benchmarks/device.py --repeats 3 --budget-s 180 --json "$(FIGURES)" && exit $$failed

known:
	$(beside)
	"$(PYTHON)" examples/benchmarks/known_runs.py --json "$(KNOWN)" $(RUNS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@"$(PYTHON)" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "penstock needs Python 3.11 or newer, and $(PYTHON) is " \
	    + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	"$(PYTHON)" -m venv --clear $(VENV)
	touch $@

dist: dist/.built

dist/.built: pyproject.toml $(SOURCES) | $(VENV)/.created
	rm -rf dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	touch $@

# TAG=v0.1.0: fails if that is not the version.
release: dist $(VENV)/.tools
	$(BIN)/python -c 'import sys; from pathlib import Path; wheel, = Path("dist").glob("*.whl"); version = wheel.name.split("-")[1]; \
	    sys.exit(None if "$(TAG)" in ("", "v" + version) else f"The tag is $(TAG), and the version is {version}.")'
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

# pip takes a wheel of the same version for the same, so the old penstock goes first. Python compiles a module when it is first imported: of these
# packages that is a small part, and compiling all of them takes longer than to unpack them. Older pips than 25.1 know no --group.
define install
$(PIP) install --constraint $(CONSTRAINTS) 'pip>=25.1'
rm -rf $(VENV)/lib/python*/site-packages/penstock $(VENV)/lib/python*/site-packages/torch_penstock-*
$(PIP) install --no-compile --constraint $(CONSTRAINTS) "$$(echo dist/torch_penstock-*.whl)$(if $(1),[$(1)])" $(2:%=--group %)
touch $@
endef

$(VENV)/.demo: $(VENV)/.created $(CONSTRAINTS) dist/.built
	@echo 'Installing penstock and what the demo needs into $(VENV); the first time takes a minute or more, most of it for torch.'
	$(call install,,examples)

$(VENV)/.installed: $(VENV)/.created $(CONSTRAINTS) dist/.built
	@echo 'Installing penstock and what it is tested with into $(VENV); the first time takes a minute or more.'
	$(call install,$(EXTRAS),$(DEPENDENCY_GROUPS))
	touch $(VENV)/.demo $(VENV)/.tools

$(VENV)/.mutants: $(VENV)/.tools
	$(PIP) install --no-compile --constraint $(CONSTRAINTS) --group mutants
	touch $@

# The packages, whichever penstock is installed beside them.
$(VENV)/.tools: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(MAKE) $(VENV)/.installed
	touch $@
