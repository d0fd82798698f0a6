"""Shared fixtures: one eager engine on the real model serves most tests."""

import logging
import os
from collections.abc import Iterator

# Read by vLLM when an engine starts.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm import LLM

from polygraph_hs import CaptureEngine, HiddenStatesModel
from polygraph_hs.smollm2 import smollm2_path

# Chunked prefill in pieces of 32 tokens; prefixes cached in blocks of 32; float32, so that states can be compared
# closely.
ENGINE_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 32,
    "block_size": 32,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**30,
}
# The random Llama needs less.
TINY_OPTIONS = {**ENGINE_OPTIONS, "kv_cache_memory_bytes": 2**28}
LAYERS = (0, 1, 15, 29, 30)


def pytest_unconfigure():
    """vLLM ends its engines at exit and logs it, when pytest has closed what the log is written to."""
    logging.raiseExceptions = False


def start(model: str, layers, **options) -> CaptureEngine:
    """Start an eager engine that takes no code, whatever the test that needs it first has set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
        return CaptureEngine.start(model, layers, enforce_eager=True, **options)


@pytest.fixture(scope="session")
def smollm2() -> str:
    return str(smollm2_path())


def started(model: str, layers, **options) -> Iterator[CaptureEngine]:
    """An engine for a fixture, which ends with it."""
    engine = start(model, layers, **options)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def engine(smollm2):
    yield from started(smollm2, LAYERS, **ENGINE_OPTIONS)


@pytest.fixture
def model(engine):
    """A plain-prompt model on the shared engine, with a fresh plan: layer 15, generated tokens."""
    return HiddenStatesModel.from_llm(engine.llm, layers=[15], max_new_tokens=8, verbose=False)


@pytest.fixture
def chat_model(engine):
    return HiddenStatesModel.from_llm(engine.llm, layers=[15], instruct=True, max_new_tokens=8, verbose=False)


@pytest.fixture(scope="session")
def hugging_face(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, smollm2) -> str:
    """A random Llama of 4 layers and hidden size 128, with SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def plain_llm(tiny_llama):
    """Starts an LLM as a user would who has not heard of capture."""
    return lambda **options: LLM(tiny_llama, dtype="float32", max_model_len=256, kv_cache_memory_bytes=2**28, **options)


@pytest.fixture(scope="session")
def tiny_engine(tiny_llama):
    """A second engine beside the real model's: the random Llama, eager."""
    yield from started(tiny_llama, range(5), **TINY_OPTIONS)


@pytest.fixture(scope="session")
def tiny_hugging_face(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
