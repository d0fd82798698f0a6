"""Tensor and pipeline parallel engines give the states of one worker; delivery works without shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENGINE_OPTIONS
from reference import assert_states_equal_hugging_face, firsts, random_prompts
from safetensors.torch import load_file
from vllm import SamplingParams

import polygraph_hs.engine
from polygraph_hs import CaptureEngine, CapturePlan

LAYERS = (0, 1, 2, 3, 4)
PLANS = [
    *(CapturePlan(LAYERS, tokens) for tokens in ("last_prompt", "generated", "prompt", "all")),
    CapturePlan((1, 3), "all", "mean"),
    CapturePlan((4,), "generated"),
    None,
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
OPTIONS = {**ENGINE_OPTIONS, "kv_cache_memory_bytes": 2**28}


@pytest.fixture(scope="module")
def two_workers():
    """Two CPU workers need a core each, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


@pytest.fixture(scope="module")
def tensor_parallel(tiny_llama, two_workers):
    return CaptureEngine.start(tiny_llama, LAYERS, enforce_eager=True, tensor_parallel_size=2, **OPTIONS)


@pytest.fixture(scope="module")
def pipeline_parallel(tiny_llama, two_workers):
    # Compiled: vLLM's CPU build itself fails with eager pipeline stages.
    return CaptureEngine.start(tiny_llama, LAYERS, pipeline_parallel_size=2, **OPTIONS)


@pytest.fixture(params=["tensor_parallel", "pipeline_parallel"])
def several(request):
    return request.getfixturevalue(request.param)


def test_each_layer_comes_from_one_worker(tensor_parallel, pipeline_parallel):
    taps = {
        name: engine.llm.collective_rpc("capture_add_layers", args=([],))
        for name, engine in (("tensor", tensor_parallel), ("pipeline", pipeline_parallel))
    }
    # Every tensor-parallel rank has every state; the first delivers. A pipeline stage has its own layers.
    assert taps == {"tensor": [[0, 1, 2, 3, 4], []], "pipeline": [[0, 1, 2], [3, 4]]}


def test_states_are_hugging_faces_and_the_one_workers(several, tiny_engine, tiny_hugging_face):
    plans = PLANS * 3
    prompts = random_prompts([1, 33, 64, 100, 5, 7, 12] * 3, seed=90)
    groups = several.generate(prompts, GREEDY, plans)
    alone = tiny_engine.generate(prompts, GREEDY, plans)
    for (generation,), (expected,), plan in zip(groups, alone, plans, strict=True):
        assert generation.token_ids == expected.token_ids
        if plan is None:
            assert generation.hidden_states is None
            continue
        assert_states_equal_hugging_face([generation], tiny_hugging_face, plan)
        one, other = generation.hidden_states, expected.hidden_states
        assert (one.layers, one.positions.tolist()) == (other.layers, other.positions.tolist())
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)


def test_samples_and_borrowed_prefixes(several, tiny_hugging_face):
    plan = CapturePlan(LAYERS, "all")
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    groups = several.generate(random_prompts([70], seed=91) * 3, sampling, plan)
    assert len({tuple(sample.token_ids) for samples in groups for sample in samples}) > 3
    assert groups[-1][0].num_cached_tokens == 64
    assert {tuple(reply.values()) for reply in several.llm.collective_rpc("capture_held")} == {(0, 0, 0)}
    for samples in groups:
        assert_states_equal_hugging_face(samples, tiny_hugging_face, plan)


@pytest.mark.parametrize("kind", ["tiny_engine", "pipeline_parallel"])
def test_bytes_over_rpc_where_the_workers_memory_cannot_be_mapped(kind, request, monkeypatch):
    engine = request.getfixturevalue(kind)
    prompts, plan = random_prompts([9, 40], seed=92), CapturePlan(LAYERS, "all")
    mapped = firsts(engine.generate(prompts, GREEDY, plan))
    # What a driver on another machine finds. In pieces far smaller than the states.
    monkeypatch.setattr(polygraph_hs.engine, "open_parcel", lambda description: None)
    monkeypatch.setattr(polygraph_hs.engine, "FETCH_BYTES", 1000)
    fetched = firsts(engine.generate(prompts, GREEDY, plan))
    for one, other in zip(mapped, fetched, strict=True):
        assert torch.equal(one.hidden_states.values, other.hidden_states.values)
    assert {reply["parcels"] for reply in engine.llm.collective_rpc("capture_held")} == {0}


def test_the_data_parallel_example(tiny_llama, tiny_engine, tmp_path):
    prompts = tmp_path / "prompts.txt"
    texts = [f"The capital of country number {number} is" for number in range(7)]
    prompts.write_text("\n".join(texts) + "\n")
    script = Path(__file__).parents[1] / "examples" / "data_parallel.py"
    command = [sys.executable, str(script), tiny_llama, str(prompts), str(tmp_path / "out"), "--processes", "2"]
    options = ["--layers", "2", "4", "--max-new-tokens", "8", "--dtype", "float32"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run([*command, *options], check=True, timeout=400, env=environment)
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())
    states = load_file(tmp_path / "out" / "states.safetensors")
    assert [answer["prompt"] for answer in answers] == texts
    assert {answer["process"] for answer in answers} == {0, 1}
    plan = CapturePlan((2, 4), "generated")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for number, generation in enumerate(firsts(tiny_engine.generate(texts, greedy, plan))):
        assert answers[number]["token_ids"] == generation.token_ids
        torch.testing.assert_close(states[str(number)], generation.hidden_states.values, rtol=1e-4, atol=1e-5)
