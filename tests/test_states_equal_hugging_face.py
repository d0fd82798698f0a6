"""Captured states are Hugging Face's, for every layer, position, selection and pooling."""

import numpy as np
import pytest
import torch
from conftest import ENGINE_OPTIONS, LAYERS
from reference import assert_states_equal_hugging_face, firsts, random_prompts, reference_log_likelihoods
from vllm import SamplingParams

from polygraph_hs import CaptureEngine, CapturePlan, LayerNotTappedError

PROMPT_LENGTHS = (1, 2, 7, 31, 32, 33, 64, 100, 200)
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled_engine(smollm2):
    return CaptureEngine.start(smollm2, LAYERS, **ENGINE_OPTIONS)


@pytest.mark.parametrize("kind", ["engine", "compiled_engine"])
def test_every_position_of_a_batch_in_chunks_of_32_tokens(kind, request, hugging_face):
    engine = request.getfixturevalue(kind)
    plan = CapturePlan((0, 1, 15, 29, 30, -1), "all")
    generations = engine.generate(random_prompts(PROMPT_LENGTHS), GREEDY, plan)
    assert_states_equal_hugging_face(firsts(generations), hugging_face, plan)


def test_the_compiled_engine_really_is_compiled(compiled_engine):
    config = compiled_engine.llm.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.mode.name != "NONE"


def test_a_layer_that_a_compiled_engine_does_not_tap_is_an_error_naming_those_it_has(compiled_engine):
    with pytest.raises(LayerNotTappedError, match=r"layers \[7\] are not tapped.*has layers \[0, 1, 15, 29, 30\]"):
        compiled_engine.generate(random_prompts([5]), GREEDY, CapturePlan((7,)))
    (generation,) = compiled_engine.generate(random_prompts([5]), GREEDY, CapturePlan((15,)))[0]
    assert generation.hidden_states.values.shape == (1, 8, 576)


@pytest.mark.parametrize("tokens", ["last_prompt", "generated", "prompt", "all"])
def test_each_token_selection_has_its_positions(engine, hugging_face, tokens):
    plan = CapturePlan((15, -1), tokens)
    generations = engine.generate(random_prompts([1, 40, 70], seed=2), GREEDY, plan)
    assert_states_equal_hugging_face(firsts(generations), hugging_face, plan)


@pytest.mark.parametrize("tokens", ["last_prompt", "generated", "prompt", "all"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_each_pooling_equals_the_pooled_unpooled_states(engine, tokens, pooling):
    prompts = random_prompts([1, 40, 70], seed=3)
    whole = engine.generate(prompts, GREEDY, CapturePlan((0, 15, 30), tokens))
    pooled = engine.generate(prompts, GREEDY, CapturePlan((0, 15, 30), tokens, pooling))
    for (one,), (other,) in zip(whole, pooled, strict=True):
        values = one.hidden_states.values
        expected = values.float().mean(dim=1) if pooling == "mean" else values[:, -1]
        assert other.hidden_states.values.shape == (3, 1, 576)
        torch.testing.assert_close(other.hidden_states.values[:, 0], expected, rtol=1e-4, atol=1e-4)
        selected = other.hidden_states.select(15, tokens, pooling)
        torch.testing.assert_close(selected, one.hidden_states.select(15, tokens, pooling), rtol=1e-4, atol=1e-4)


def test_samples_of_one_request_each_have_their_own_states(engine, hugging_face):
    # Long enough that two samples are not the same by chance.
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=24, logprobs=1, ignore_eos=True)
    plan = CapturePlan((15,), "all")
    for samples in engine.generate(random_prompts([9, 40], seed=4), sampling, plan):
        assert len({tuple(sample.token_ids) for sample in samples}) == 3
        assert_states_equal_hugging_face(samples, hugging_face, plan)


def test_log_likelihoods_are_hugging_faces(engine, hugging_face):
    for (generation,) in engine.generate(random_prompts([5, 50], seed=5), GREEDY, None):
        reference = reference_log_likelihoods(hugging_face, generation.prompt_token_ids, generation.token_ids)
        np.testing.assert_allclose(generation.log_likelihoods, reference, atol=1e-4)
        # Greedy: the token made is the most probable one.
        assert generation.top_token_ids[:, 0].tolist() == generation.token_ids
        assert generation.top_log_likelihoods.shape == (8, 5)


def test_a_generation_without_a_plan_has_no_states(engine):
    (generation,) = engine.generate(random_prompts([5]), GREEDY, None)[0]
    assert generation.hidden_states is None


def test_states_outlive_the_next_generation(engine):
    plan = CapturePlan((15,), "all")
    (first,) = engine.generate(random_prompts([20], seed=6), GREEDY, plan)[0]
    before = first.hidden_states.values.clone()
    engine.generate(random_prompts([20, 30], seed=7), GREEDY, plan)
    assert torch.equal(first.hidden_states.values, before)


def test_an_eager_engine_takes_on_more_layers_and_keeps_the_ones_it_had(engine, hugging_face):
    plan = CapturePlan((3, 22), "all")
    assert_states_equal_hugging_face(
        firsts(engine.generate(random_prompts([40], seed=8), GREEDY, plan)), hugging_face, plan
    )
    assert {*LAYERS, 3, 22} <= set(engine.tapped_layers)


def test_two_views_of_one_eager_engine_do_not_take_each_others_taps(engine, hugging_face):
    other = CaptureEngine(engine.llm)
    for view, layer in ((other, 5), (engine, 6), (other, 6), (engine, 5)):
        plan = CapturePlan((layer,), "all")
        generations = view.generate(random_prompts([12], seed=9), GREEDY, plan)
        assert_states_equal_hugging_face(firsts(generations), hugging_face, plan)


def test_more_prompts_than_the_engine_runs_at_once_are_all_complete(engine, hugging_face):
    prompts = random_prompts([1, 100, 30] * 8, seed=10)
    plan = CapturePlan((15,), "all")
    generations = firsts(engine.generate(prompts, GREEDY, plan))
    assert [generation.prompt_token_ids for generation in generations] == prompts
    assert_states_equal_hugging_face(generations, hugging_face, plan)


def test_bfloat16_states_stay_bfloat16_and_means_are_float32(tiny_llama):
    engine = CaptureEngine.start(
        tiny_llama, [2], dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=2**28, enforce_eager=True
    )
    for pooling, dtype in (("none", torch.bfloat16), ("mean", torch.float32)):
        (generation,) = engine.generate(random_prompts([9]), GREEDY, CapturePlan((2,), "all", pooling))[0]
        assert generation.hidden_states.values.dtype == dtype
