"""HiddenStatesModel: prompts reach the model as they are, plans grow, results are in order."""

import pytest
import torch
from reference import random_prompts

from polygraph_hs import CapturePlan, HiddenStatesModel
from polygraph_hs.estimators import LinearProbe, MahalanobisDistance

START = "The capital of France is"
QUESTION = "What is the capital of France?"


def test_results_come_in_the_order_of_the_prompts(model):
    prompts = random_prompts([60, 3, 33, 1])
    assert [generation.prompt_token_ids for generation in model.capture(prompts)] == prompts


def test_a_text_becomes_the_tokenizers_ids(model):
    (generation,) = model.capture([START])
    assert generation.prompt == START
    assert generation.prompt_token_ids == model.tokenizer(START)["input_ids"]
    assert generation.finish_reason == "length"


def test_token_ids_are_not_decoded_and_tokenized_again(model):
    # " the" and "the": joined by decoding, these ids would come back as others.
    ids = [value for text in ("t", "h", "e", " ", "c", "a", "t") for value in model.tokenizer(text)["input_ids"]]
    assert model.tokenizer(model.tokenizer.decode(ids))["input_ids"] != ids
    assert model.capture([ids])[0].prompt_token_ids == ids


def test_instruct_uses_the_chat_template(chat_model):
    (generation,) = chat_model.capture([QUESTION])
    expected = chat_model.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert generation.prompt_token_ids == expected
    assert generation.text.startswith("The capital of France is Paris.")


def test_a_system_prompt_of_the_users_own_is_put_first(engine):
    system = "You answer in one word."
    model = HiddenStatesModel.from_llm(engine.llm, instruct=True, system_prompt=system, verbose=False)
    chat = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    assert model.tokenize_prompt(QUESTION) == model.tokenize_prompt(chat)
    assert system in model.tokenizer.decode(model.tokenize_prompt(QUESTION))


def test_a_system_prompt_without_a_chat_is_an_error(engine):
    with pytest.raises(ValueError, match="pass instruct=True as well"):
        HiddenStatesModel.from_llm(engine.llm, system_prompt="Be brief.")


def test_installing_estimators_widens_the_plan_once(model):
    model.install(LinearProbe(1, tokens="last_prompt"))
    assert model.plan == CapturePlan((1, 15), "generated")
    model.install(MahalanobisDistance(-1, tokens="prompt", pooling="mean"))
    model.install(MahalanobisDistance(-1, tokens="prompt", pooling="mean"))
    assert model.plan == CapturePlan((1, 15, 30), "all")


def test_generate_for_lm_polygraphs_own_calculators_agrees_with_capture(chat_model):
    prompts = [QUESTION, "What is the chemical symbol for gold? Answer with the symbol alone."]
    batch = chat_model.tokenize(prompts)
    output = chat_model.generate(**batch, max_new_tokens=8, output_scores=True, return_dict_in_generate=True)
    for sequence, scores, generation in zip(output.sequences, output.scores, chat_model.capture(prompts), strict=True):
        length = len(generation.token_ids)
        assert sequence[:length].tolist() == generation.token_ids
        likelihoods = scores[range(length), generation.token_ids]
        torch.testing.assert_close(likelihoods, torch.from_numpy(generation.log_likelihoods), rtol=1e-4, atol=1e-4)
        assert torch.isfinite(scores[:length]).sum(dim=1).tolist() == [20] * length


def test_generate_refuses_what_vllm_does_not_return(model):
    with pytest.raises(ValueError, match="output_attentions=True is not available"):
        model.generate(**model.tokenize(["Hello"]), output_attentions=True)


def test_generated_texts_are_flat_and_in_order(chat_model):
    texts = chat_model.generate_texts([QUESTION, QUESTION], max_new_tokens=8)
    assert texts == [chat_model.capture([QUESTION])[0].text] * 2


def test_newlines_can_be_forbidden(engine):
    parameters = HiddenStatesModel.from_llm(engine.llm, verbose=False).generation_parameters
    prompt = "List three colours:\n1. red\n"
    for allowed in (True, False):
        parameters.allow_newlines = allowed
        model = HiddenStatesModel.from_llm(
            engine.llm, generation_parameters=parameters, max_new_tokens=12, verbose=False
        )
        assert ("\n" in model.capture([prompt])[0].text) == allowed


def test_a_result_shows_what_it_holds(model):
    (generation,) = model.capture([START])
    assert "8 tokens, finish_reason='length'" in repr(generation)
    assert "1 layers [15], 8 tokens (generated, pooling none), hidden size 576, torch.float32" in repr(generation)


def test_an_llm_that_the_user_built_with_the_worker_class_is_taken_as_it_is(plain_llm):
    llm = plain_llm(
        enforce_eager=True,
        worker_cls="polygraph_hs.capture.worker.CaptureWorker",
        additional_config={"polygraph_hs": {"layers": [-1]}},
    )
    model = HiddenStatesModel.from_llm(llm, layers=[-1], tokens="all", verbose=False)
    assert model.engine.tapped_layers == (4,)
    (generation,) = model.capture(random_prompts([9]), 4)
    assert generation.hidden_states.values.shape == (1, 12, 128)
