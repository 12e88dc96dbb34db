# Commands that do all their own set-up: `make train`, `make train-hf` and `make test`.
PYTHON ?= python3
VENV ?= .venv
TRITON ?= build/triton
TRITON_VERSION ?= triton==3.9.0
TOOLCHAIN ?= build/toolchain
RUN := $(VENV)/bin/python

# Triton and the Ascend tool chain are fetched side by side.
MAKEFLAGS += -j

# Where the environment forbids byte code every process would compile torch's sources anew: 17 s of imports in place of 7.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train train-hf lint bench-gpu test test-slow test-npu test-suites test-versions fuzz scenarios docs clean

train: $(VENV)/ready
	$(RUN) examples/pretrain_gpt.py $(ARGS)

# One process per core, one thread each; CI, so that torch is as strict here as it is there.
SPREAD ?= -n auto --dist worksteal
SETTINGS := CI=1 OMP_NUM_THREADS=1 MINDSPEED_FX_TRITON=$(TRITON) MINDSPEED_FX_TOOLCHAIN=$(TOOLCHAIN)

# On several processes with RANKS=4.
RANKS ?= 1
train-hf: $(VENV)/ready
	$(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) examples/train_hf.py $(ARGS)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: $(VENV)/ready $(TRITON)/ready $(TOOLCHAIN)/ready
	$(SETTINGS) $(RUN) -m pytest $(SPREAD) -m "not slow and not cuda" $(ARGS)

test-slow: $(VENV)/ready $(TRITON)/ready $(TOOLCHAIN)/ready
	$(SETTINGS) $(RUN) -m pytest $(SPREAD) $(ARGS)

test-npu: $(VENV)/ready $(TOOLCHAIN)/ready
	$(SETTINGS) $(RUN) -m pytest $(SPREAD) -m "npu and not slow" $(ARGS)

# Every kernel and whole model on a CUDA device beside eager PyTorch, Inductor and, where they are installed, Liger's, by
# the Python that has the device's torch: make bench-gpu PYTHON=python3. What was measured is not measured again.
bench-gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)

# Programs at random against eager PyTorch, until the time is over.
MINUTES ?= 10
SEED ?= 1
fuzz: $(VENV)/ready
	CI=1 OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# The usual tests, or those of ARGS, with other versions of Python, torch, transformers and Megatron-core, each in an
# environment in build/versions (several GB for another torch; ARGS=--drop removes each after its run).
test-versions: $(VENV)/ready $(TRITON)/ready $(TOOLCHAIN)/ready
	$(SETTINGS) $(RUN) -m tests.versions $(ARGS)

# The site of the documentation, into build/site; a warning is an error.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# torch's own tests with this backend in place of Inductor and aot_eager: its databases of operators and modules, and, of
# TORCH_SRC, a checkout of the installed version, its files.
test-suites: $(VENV)/ready
	CI=1 OMP_NUM_THREADS=1 $(RUN) -m tests.torch_suites.suite tests/torch_suites/installed operators.py modules.py $(ARGS)
	$(if $(TORCH_SRC),CI=1 OMP_NUM_THREADS=1 $(RUN) -m tests.torch_suites.suite $(TORCH_SRC) $(ARGS))

# Libraries around the backend (tests/scenarios), each scenario with eager PyTorch and with ours. None of the libraries is a
# dependency; they have a directory of their own, without what they depend on, so that torch stays what it is.
SCENARIOS ?= build/scenarios
scenarios: $(SCENARIOS)/ready
	CI=1 OMP_NUM_THREADS=1 $(RUN) -m tests.scenarios --backend passes mindspeed --write docs/scenarios.md $(ARGS)

$(SCENARIOS)/ready: $(VENV)/ready tests/scenarios/requirements.txt
	mkdir -p $(SCENARIOS)
	$(VENV)/bin/pip install -q --no-compile --disable-pip-version-check --no-deps --upgrade --target $(SCENARIOS) \
		-r tests/scenarios/requirements.txt
	touch $@

# Triton has a directory of its own: the tests of its kernels use it in other processes, and torch must not find it, for
# with triton importable it behaves differently. Where there is no wheel those tests are skipped with the reason.
$(TRITON)/ready: $(VENV)/ready
	mkdir -p $(TRITON)
	-$(VENV)/bin/pip install -q --no-compile --disable-pip-version-check --no-deps --upgrade --target $(TRITON) "$(TRITON_VERSION)"
	touch $@

# The Ascend tool chain (340 MB to download, 1.1 GB on disk, half a minute) in a directory of its own too, for the tests
# marked npu, which are skipped where it could not be installed.
$(TOOLCHAIN)/ready: $(VENV)/ready mindspeed_fx/ascend/toolchain.py
	mkdir -p $(TOOLCHAIN)
	-$(RUN) -m mindspeed_fx.cli toolchain install --dir $(TOOLCHAIN)
	touch $@

# Torch first and on its own: with it installed at the pinned version, nothing else can pull another build. Byte code is left
# to the first import: most of what is installed is never imported.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --no-compile --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
