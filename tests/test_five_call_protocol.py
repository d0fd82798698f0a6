"""The five-call protocol: called as its clients call it, and by lm-polygraph's own client, unmodified."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ENGINE_OPTIONS
from lm_polygraph.estimators import MeanTokenEntropy
from lm_polygraph.stat_calculators import EntropyCalculator, VLLMLogprobsExtractionCalculator
from lm_polygraph.utils import VLLMWithUncertainty
from reference import drop_a_row, random_prompts, reference_states, relative_error
from vllm import LLM, SamplingParams
from vllm.config import ParallelConfig, VllmConfig

from polygraph_hs import CaptureEngine
from polygraph_hs.capture.extension import HookHiddenStatesExtension

BLOCKS = [0, 14, 28]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EXTENSION = "polygraph_hs.capture.extension.HookHiddenStatesExtension"


@pytest.fixture(scope="module")
def llm(smollm2):
    return LLM(smollm2, enforce_eager=True, worker_extension_cls=EXTENSION, **ENGINE_OPTIONS)


@pytest.fixture(scope="module")
def open_llm(plain_llm):
    """An engine whose worker takes code, for the last tests: the driver sends code from then on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield plain_llm(enforce_eager=True, worker_extension_cls=EXTENSION)


def rpc(llm, method: str, *args):
    (reply,) = llm.llm_engine.collective_rpc(method, args=args)
    return reply


def generate(llm, prompts, sampling=GREEDY):
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def test_shapes_and_counts_of_two_prompts(llm):
    llm.reset_prefix_cache()
    assert rpc(llm, "_setup_hidden_states_capture", [28, 0, 14]) == BLOCKS
    rpc(llm, "_reset_capture")
    generate(llm, random_prompts([11, 14]))
    states = {
        block: {req_id: pickle.loads(data) for req_id, data in requests.items()}
        for block, requests in rpc(llm, "_get_captured_states").items()
    }
    counts = rpc(llm, "_get_capture_metadata")
    assert sorted(states) == BLOCKS
    for requests in states.values():
        # 11 + 8 and 14 + 8 tokens, of which the last is never fed to the model and has no state.
        assert sorted(array.shape for array in requests.values()) == [(19, 576), (22, 576)]
        assert {array.dtype for array in requests.values()} == {np.dtype("float32")}
        for req_id, array in requests.items():
            known = ~np.isnan(array).any(axis=1)
            assert known.tolist() == [True] * counts[req_id]["total_computed"] + [False]
    # Counted once a step, not once a layer.
    assert sorted(tuple(count.values()) for count in counts.values()) == [(18, 11), (21, 14)]
    # Both calls clear.
    assert rpc(llm, "_get_captured_states") == {block: {} for block in BLOCKS}
    assert rpc(llm, "_get_capture_metadata") == {}


def test_states_in_chunks_are_hugging_faces(llm, hugging_face):
    llm.reset_prefix_cache()
    rpc(llm, "_setup_hidden_states_capture", BLOCKS)
    outputs = generate(llm, random_prompts([1, 33, 100], seed=70))
    states = rpc(llm, "_get_captured_states")
    for output in outputs:
        reference = reference_states(hugging_face, [*output.prompt_token_ids, *output.outputs[0].token_ids])
        for block in BLOCKS:
            ((_, data),) = [entry for entry in states[block].items() if entry[0].startswith(f"{output.request_id}-")]
            # Block i's output is Hugging Face's state i + 1.
            assert relative_error(torch.from_numpy(pickle.loads(data))[:-1], reference[block + 1]) < 1e-4
    rpc(llm, "_reset_capture")


def test_a_cached_prefix_is_not_among_the_rows_and_not_counted(llm, hugging_face):
    rpc(llm, "_setup_hidden_states_capture", BLOCKS)
    prompt = random_prompts([70], seed=71)
    generate(llm, prompt)
    rpc(llm, "_reset_capture")
    (output,) = generate(llm, prompt)
    assert output.num_cached_tokens == 64
    ((req_id, data),) = rpc(llm, "_get_captured_states")[14].items()
    reference = reference_states(hugging_face, [*prompt[0], *output.outputs[0].token_ids])[15]
    assert relative_error(torch.from_numpy(pickle.loads(data))[:-1], reference[64:]) < 1e-4
    assert rpc(llm, "_get_capture_metadata") == {req_id: {"total_computed": 13, "prefill_tokens": 6}}


def test_other_layers_replace_the_first_and_none_removes_the_taps(llm):
    rpc(llm, "_setup_hidden_states_capture", BLOCKS)
    generate(llm, random_prompts([5]))
    assert rpc(llm, "_setup_hidden_states_capture", [3]) == [3]
    generate(llm, random_prompts([5], seed=72))
    states = rpc(llm, "_get_captured_states")
    assert {block: len(requests) for block, requests in states.items()} == {3: 1}
    assert rpc(llm, "_setup_hidden_states_capture", []) == []
    generate(llm, random_prompts([5], seed=73))
    assert rpc(llm, "_get_captured_states") == rpc(llm, "_get_capture_metadata") == {}


def test_a_block_that_does_not_exist_is_an_error_and_changes_nothing(llm):
    rpc(llm, "_setup_hidden_states_capture", [3])
    with pytest.raises(Exception, match=r"layer_ids=\[30, -1\] do not exist: this model has decoder blocks 0 to 29"):
        rpc(llm, "_setup_hidden_states_capture", [30, 2, -1])
    generate(llm, random_prompts([5], seed=74))
    assert len(rpc(llm, "_get_captured_states")[3]) == 1


def test_a_refusal_comes_from_the_last_of_several_workers_alone():
    # vLLM stops reading at the first error, and would take the replies behind it for those of the next call.
    worker = HookHiddenStatesExtension()
    worker.vllm_config = VllmConfig(parallel_config=ParallelConfig(pipeline_parallel_size=2))
    worker.vllm_config.model_config = SimpleNamespace(enforce_eager=True)
    worker.parallel_config = worker.vllm_config.parallel_config
    worker.rank = 0
    assert worker._setup_hidden_states_capture([3]) == []
    worker.rank = 1
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: .* read the first worker's answer alone"):
        worker._setup_hidden_states_capture([3])


QUESTIONS = ["What is the capital of France?", "Name three colours of the rainbow, please:"]


@pytest.fixture
def client(llm):
    return VLLMWithUncertainty(
        llm,
        [VLLMLogprobsExtractionCalculator(), EntropyCalculator()],
        MeanTokenEntropy(),
        n_logprobs=5,
        output_hidden_states=True,
        hs_layer_ids=BLOCKS,
        use_native_hs_capture=True,
    )


def assert_clients_states_are_hugging_faces(results, hugging_face, n: int) -> None:
    for result in results:
        assert len(result.uncertainty_scores) == len(result.outputs) == n
        for output in result.outputs:
            token_ids = [*result.prompt_token_ids, *output.token_ids]
            reference = reference_states(hugging_face, token_ids)
            states = output.hidden_states_payload["hidden_states"]
            assert len(states) == len(BLOCKS)
            for block, values in zip(BLOCKS, states, strict=True):
                assert relative_error(values[:-1], reference[block + 1]) < 1e-4
                # The last token has no state, and says so: the client has added no zeros for it.
                assert torch.isnan(values[-1]).all()


@pytest.mark.parametrize("n", [1, 3])
def test_lm_polygraphs_own_client_gets_true_states(client, hugging_face, n):
    # Long enough that two samples are not the same by chance.
    sampling = SamplingParams(n=n, temperature=float(n > 1), max_tokens=24, ignore_eos=True)
    # The second time the client has states of these prompts from before.
    for _ in range(2):
        results = client.generate(QUESTIONS, sampling)
        assert_clients_states_are_hugging_faces(results, hugging_face, n)
        if n > 1:
            assert len({tuple(output.token_ids) for output in results[0].outputs}) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_lm_polygraphs_own_client_fills_a_cached_prefix_with_true_states(client, hugging_face, n):
    sampling = SamplingParams(n=n, temperature=float(n > 1), max_tokens=8, ignore_eos=True)
    client.reset_hs_step_cache()
    text = client.tokenizer.decode(random_prompts([70], seed=75)[0])
    (first,) = client.generate([text], sampling)
    assert_clients_states_are_hugging_faces([first], hugging_face, n)
    # A step further, as in a search over continuations: the prompt so far is in vLLM's cache.
    (second,) = client.generate([text + first.outputs[0].text], sampling)
    assert second.num_cached_tokens == 64
    assert_clients_states_are_hugging_faces([second], hugging_face, n)


def test_lm_polygraphs_client_refuses_an_engine_without_the_protocol(engine):
    with pytest.raises(ValueError, match="worker_extension_cls"):
        VLLMWithUncertainty(
            engine.llm,
            [],
            MeanTokenEntropy(),
            output_hidden_states=True,
            hs_layer_ids=[1],
            use_native_hs_capture=True,
        )


def test_a_lost_row_is_an_error_and_costs_no_other_request_its_states(open_llm):
    rpc(open_llm, "_setup_hidden_states_capture", [0, 2, 3])
    rpc(open_llm, drop_a_row)
    first, second = generate(open_llm, random_prompts([20, 10], seed=76))
    with pytest.raises(
        Exception,
        match=rf"the states of 1 of 2 requests are incomplete.*request {first.request_id}-.*: 1 of 27 positions",
    ):
        rpc(open_llm, "_get_captured_states")
    for requests in rpc(open_llm, "_get_captured_states").values():
        ((req_id, data),) = requests.items()
        assert req_id.startswith(f"{second.request_id}-")
        assert pickle.loads(data).shape == (18, 128)


def test_a_capture_engine_on_an_engine_that_is_set_up_for_the_five_calls_is_an_error(open_llm):
    rpc(open_llm, "_setup_hidden_states_capture", [3])
    with pytest.raises(Exception, match="this engine is set up for the five-call protocol; end that first"):
        CaptureEngine(open_llm)
    generate(open_llm, random_prompts([5], seed=77))
    assert len(rpc(open_llm, "_get_captured_states")[3]) == 1
