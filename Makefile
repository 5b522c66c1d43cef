# make demo      compile the shipped checkpoint and generate from it
# make test      the tests, without the slow ones
# make check     format, lint, types, architecture
# make test-all  every test
# make triton    the GPU kernels: interpreted on the CPU, and compiled for every target; installs Triton (190 MB)
# make cross     whole graphs for a graphics card, built without one, in .venv-cross (installs 5 GB)
# make gpu       check and measure the GPU kernels on a machine with a card (GPU="--dry-run": without one)
# make mutants   put small mistakes into the sources, one by one; a test must notice each (MUTANTS="sampling F10")
# make bench     measure: ratios with quartiles at 1 and 2 threads (BENCH="--only sample --json figures.json")
#
# Without an active virtual environment, one is made in .venv and the package is installed into it as a wheel.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell command -v $(name))))
GPU_PYTHON ?= python3
WORKERS ?= 2
CROSS ?= $(CURDIR)/.venv-cross
SOURCES := $(shell find deepinfer graphs passes kernels artifacts runtime -name '*.py' -o -name '*.cpp' -o -name '*.h' \
	-o -name '*.cu' -o -name '*.json')

# One thread per process: builds and tests already run one process per core.
export OMP_NUM_THREADS ?= 1
# The installed package is what runs, not the folder of the same name here.
export PYTHONSAFEPATH := 1

ifdef VIRTUAL_ENV
BIN := $(VIRTUAL_ENV)/bin
READY :=
else
BIN := $(CURDIR)/.venv/bin
READY := .venv/.package
endif

.PHONY: demo test test-all triton cross gpu check mutants bench clean

demo: $(READY)
	$(BIN)/deepinfer-compile examples/tiny/checkpoint -o demo-artifact --force
	$(BIN)/deepinfer generate demo-artifact --prompt "It was a fine morning, and Elizabeth" \
		--max-tokens 150 --temperature 0.7 --seed 1

test: $(READY)
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not slow"

test-all: $(READY)
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile

triton: $(READY)
	$(BIN)/pip install -q -c constraints.txt triton nvidia-cuda-nvrtc
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not slow" \
		-k "triton or cuda_target" tests/kernels
	$(BIN)/pytest -q tests/kernels/test_cuda_target.py tests/kernels/test_cuda_gate.py \
		tests/kernels/test_cuda_layouts.py tests/kernels/test_triton.py tests/build/test_gpu_kernels.py

# Torch with CUDA in an environment of its own; neither a card nor a driver is needed.
cross: $(CROSS)/.package
	$(CROSS)/bin/pytest -q tests/cross tests/passes/test_cuda_compile_only.py

# With the machine's own Python, torch and Triton, from the tree: nothing is installed.
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU)

# mypy does not follow an editable install, so it reads a fresh copy of what the wheel holds.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build
	$(BIN)/pip install -q --no-deps --target build/typed .
	cd build/typed && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p deepinfer
	$(BIN)/pytest -q tests/test_architecture.py

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

bench: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/run.py $(BENCH)

clean:
	rm -rf build .venv .venv-cross demo-artifact .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(CROSS)/.tools: constraints-cuda.txt pyproject.toml
	$(PYTHON) -m venv $(CROSS)
	rm -rf build
	$(CROSS)/bin/pip install -q -c constraints-cuda.txt torch triton nvidia-cuda-crt nvidia-cuda-cccl
	$(CROSS)/bin/pip install -q -c constraints-cuda.txt . pytest hypothesis pytest-xdist
	touch $@

$(CROSS)/.package: $(CROSS)/.tools $(SOURCES)
	rm -rf build
	$(CROSS)/bin/pip install -q --no-deps --force-reinstall .
	touch $@

.venv/.tools: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	rm -rf build
	.venv/bin/pip install -q -c constraints.txt ".[test,dev]"
	touch $@

.venv/.package: .venv/.tools $(SOURCES)
	rm -rf build
	.venv/bin/pip install -q --no-deps --force-reinstall .
	touch $@
