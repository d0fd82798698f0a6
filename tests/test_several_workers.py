"""Engines of several workers give the states of one worker; delivery works without shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_OPTIONS
from reference import assert_states_equal_hugging_face, firsts, random_prompts
from safetensors.torch import load_file
from vllm import SamplingParams

import polygraph_hs.engine
from polygraph_hs import CaptureEngine, CapturePlan
from polygraph_hs.capture.delivery import new_token

LAYERS = (0, 1, 2, 3, 4)
PLANS = [
    *(CapturePlan(LAYERS, tokens) for tokens in ("last_prompt", "generated", "prompt", "all")),
    CapturePlan((1, 3), "all", "mean"),
    CapturePlan((4,), "generated"),
    None,
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
# vLLM's CPU platform names no Ray resource for a worker to claim, and is refused for that alone. This names one; the
# executor is vLLM's. A file of its own, because Ray's worker processes import it.
RAY_ON_THE_CPU = """
import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor_v2

CpuPlatform.ray_device_key = "vllm_worker"


class Worker(ray_executor_v2.RayWorkerProc):
    def get_node_and_physical_gpu_ids(self):
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]


class Executor(ray_executor_v2.RayExecutorV2):
    pass


ray_executor_v2.RayWorkerProc = Worker
"""


@pytest.fixture(scope="module")
def two_workers():
    """Two CPU workers need a core each, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


@pytest.fixture(scope="module")
def tensor_parallel(tiny_llama, two_workers):
    return CaptureEngine.start(tiny_llama, LAYERS, enforce_eager=True, tensor_parallel_size=2, **TINY_OPTIONS)


@pytest.fixture(scope="module")
def pipeline_parallel(tiny_llama, two_workers):
    # Compiled: vLLM's CPU build itself fails with eager pipeline stages.
    return CaptureEngine.start(tiny_llama, LAYERS, pipeline_parallel_size=2, **TINY_OPTIONS)


@pytest.fixture(scope="module")
def ray_workers(tiny_llama, tmp_path_factory):
    """Tensor parallel, each worker an actor of a Ray cluster that the caller has started."""
    import ray

    folder = tmp_path_factory.mktemp("ray")
    (folder / "ray_on_the_cpu.py").write_text(RAY_ON_THE_CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(folder)
        ray.init(
            num_cpus=2,
            resources={"vllm_worker": 2},
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
        )
        engine = CaptureEngine.start(
            tiny_llama,
            LAYERS,
            enforce_eager=True,
            tensor_parallel_size=2,
            distributed_executor_backend="ray_on_the_cpu.Executor",
            **TINY_OPTIONS,
        )
        yield engine
        engine.llm.llm_engine.engine_core.shutdown()
        ray.shutdown()


@pytest.fixture(params=["tensor_parallel", "pipeline_parallel", "ray_workers"])
def several(request):
    return request.getfixturevalue(request.param)


def test_pipeline_stages_tap_the_layers_that_they_run(pipeline_parallel):
    assert pipeline_parallel.llm.collective_rpc("capture_add_layers", args=([],)) == [[0, 1, 2], [3, 4]]


def test_tensor_parallel_ranks_have_the_same_taps(tensor_parallel):
    # vLLM's compiler fuses an all-reduce with the norm behind it, unless something else reads its result, as a tap
    # does: ranks with different taps would call different collectives, and wait for each other for good.
    assert tensor_parallel.llm.collective_rpc("capture_add_layers", args=([],)) == [[0, 1, 2, 3, 4]] * 2


def test_each_layer_is_delivered_once(several):
    request = several.prepare(GREEDY, CapturePlan(LAYERS, "all"))
    several.llm.generate([{"prompt_token_ids": [5, 6, 7]}], [request], use_tqdm=False)
    sequences, token = [[request.extra_args["polygraph_hs"]["key"], 0, GREEDY.max_tokens]], new_token()
    replies = [reply for reply in several.llm.collective_rpc("capture_collect", args=(sequences, token)) if reply]
    several.llm.collective_rpc("capture_release", args=(token,))
    assert sorted(layer for reply in replies for group in reply["groups"] for layer in group["layers"]) == list(LAYERS)


def test_no_worker_keeps_anything_of_a_call_that_has_ended(several):
    several.generate(random_prompts([9, 40], seed=93), GREEDY, CapturePlan(LAYERS, "all"))
    assert several.llm.collective_rpc("capture_held") == [{"requests": 0, "rows": 0, "parcels": 0}] * 2


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


def test_embeddings_of_a_vocabulary_split_between_two_workers(tensor_parallel, tiny_hugging_face):
    # Each worker has 24576 of the 49152 rows; the other's ids give zeros in it until the two are added up.
    prompt = [0, 1, 24574, 24575, 24576, 24577, 49150, 49151]
    sampling = SamplingParams(temperature=0, max_tokens=1)
    ((generation,),) = tensor_parallel.generate([prompt], sampling, CapturePlan((0,), "prompt"))
    expected = tiny_hugging_face.get_input_embeddings().weight.detach()[prompt]
    assert torch.equal(generation.hidden_states.layer(0), expected)


def test_samples_and_borrowed_prefixes(several, tiny_hugging_face):
    plan = CapturePlan(LAYERS, "all")
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    groups = several.generate(random_prompts([70], seed=91) * 3, sampling, plan)
    assert len({tuple(sample.token_ids) for samples in groups for sample in samples}) > 3
    assert groups[-1][0].num_cached_tokens == 64
    assert {tuple(reply.values()) for reply in several.llm.collective_rpc("capture_held")} == {(0, 0, 0)}
    for samples in groups:
        assert_states_equal_hugging_face(samples, tiny_hugging_face, plan)


@pytest.mark.parametrize("kind", ["tiny_engine", "tensor_parallel", "pipeline_parallel", "ray_workers"])
def test_bytes_over_rpc_where_the_workers_memory_cannot_be_mapped(kind, request, monkeypatch):
    engine = request.getfixturevalue(kind)
    prompts, plan = random_prompts([9, 40], seed=92), CapturePlan(LAYERS, "all")
    mapped = firsts(engine.generate(prompts, GREEDY, plan))
    # What a driver on another machine finds. In pieces far smaller than the states.
    monkeypatch.setattr(polygraph_hs.engine, "open_group", lambda description, number: None)
    monkeypatch.setattr(polygraph_hs.engine, "FETCH_BYTES", 1000)
    fetched = firsts(engine.generate(prompts, GREEDY, plan))
    for one, other in zip(mapped, fetched, strict=True):
        assert torch.equal(one.hidden_states.values, other.hidden_states.values)


def test_data_parallelism_within_one_llm_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"data_parallel_size=2.*not supported for single-process usage"):
        CaptureEngine.start(tiny_llama, LAYERS, data_parallel_size=2, **TINY_OPTIONS)


def test_the_data_parallel_example(tiny_llama, tiny_engine, tmp_path):
    prompts = tmp_path / "prompts.txt"
    texts = [f"The capital of country number {number} is" for number in range(7)]
    prompts.write_text("\n".join(texts) + "\n")
    script = Path(__file__).parents[1] / "examples" / "data_parallel.py"
    command = [sys.executable, str(script), tiny_llama, str(prompts), str(tmp_path / "out"), "--processes", "2"]
    options = ["--layers", "2", "4", "--max-new-tokens", "8", "--dtype", "float32", "--enforce-eager"]
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
