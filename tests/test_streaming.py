"""CaptureEngine.stream: every prompt once, its own states, and no more in memory than was agreed."""

import random

import pytest
from reference import assert_states_equal_hugging_face, firsts, held, random_prompts
from vllm import SamplingParams

from polygraph_hs import CapturePlan, HiddenStatesModel, PromptTooLongError

SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PLAN = CapturePlan((1, 15, 30), "generated")


def lengths(count: int) -> list[int]:
    return random.Random(1).choices(range(1, 60), k=count)


@pytest.mark.parametrize("tokens", ["last_prompt", "generated", "prompt", "all"])
def test_every_prompt_comes_once_with_its_own_states(engine, hugging_face, tokens):
    prompts = random_prompts(lengths(30))
    plan = CapturePlan((1, 15, 30), tokens)
    answers = dict(engine.stream(iter(prompts), SAMPLING, plan, max_in_flight=9))
    assert sorted(answers) == list(range(30))
    generations = [answers[number][0] for number in range(30)]
    assert [generation.prompt_token_ids for generation in generations] == prompts
    assert_states_equal_hugging_face(generations, hugging_face, plan)
    assert held(engine) == {"requests": 0, "rows": 0, "parcels": 0}


@pytest.mark.parametrize("max_in_flight", [1, 3, 12])
def test_no_more_prompts_are_taken_than_may_be_in_flight(engine, max_in_flight):
    prompts = random_prompts(lengths(25))
    taken = []
    handed_over = 0

    def counted():
        for prompt in prompts:
            taken.append(prompt)
            yield prompt

    longest = max(len(prompt) for prompt in prompts)
    for _ in engine.stream(counted(), SAMPLING, PLAN, max_in_flight=max_in_flight):
        assert len(taken) - handed_over <= max_in_flight
        now = held(engine)
        assert now["requests"] <= max_in_flight
        assert now["rows"] <= max_in_flight * (longest + SAMPLING.max_tokens)
        handed_over += 1
    assert handed_over == 25


def test_a_stream_that_the_caller_leaves_is_taken_back(engine, hugging_face):
    prompts = random_prompts(lengths(20))
    for _ in engine.stream(prompts, SAMPLING, PLAN, max_in_flight=8):
        break
    assert held(engine) == {"requests": 0, "rows": 0, "parcels": 0}
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert_states_equal_hugging_face(firsts(engine.generate(prompts[:3], SAMPLING, PLAN)), hugging_face, PLAN)


def test_prompts_that_cannot_be_answered_cost_the_others_nothing(engine):
    good = random_prompts([5, 9, 30, 7])
    prompts = [good[0], "", good[1], [1] * 512, good[2], [10**6], good[3]]
    answered = []
    with pytest.raises(ValueError, match=r"3 prompts were not answered \(prompt 1: .*prompt 3: 512 tokens.*prompt 5"):
        for number, _ in engine.stream(prompts, SAMPLING, PLAN, max_in_flight=2):
            answered.append(number)
    assert sorted(answered) == [0, 2, 4, 6]


def test_prompts_that_are_only_too_long_are_an_error_of_their_own(engine):
    good = random_prompts([5])
    with pytest.raises(PromptTooLongError, match="1 prompts were not answered"):
        list(engine.stream([*good, [1] * 512], SAMPLING, PLAN))


def test_an_error_of_the_callers_iterable_comes_after_the_prompts_before_it(engine):
    good = random_prompts([5, 9, 30])

    def prompts():
        yield from good
        raise OSError("the disk is gone")

    answered = []
    with pytest.raises(OSError, match="the disk is gone"):
        for number, _ in engine.stream(prompts(), SAMPLING, PLAN):
            answered.append(number)
    assert sorted(answered) == [0, 1, 2]


def test_prefixes_are_borrowed_within_a_stream(engine, hugging_face):
    prefix, *own = random_prompts([96, *[7] * 20], seed=3)
    prompts = [prefix + tail for tail in own]
    plan = CapturePlan((1, 15), "all")
    answers = dict(engine.stream(prompts, SAMPLING, plan, max_in_flight=16))
    generations = [answers[number][0] for number in range(20)]
    assert sum(generation.num_cached_tokens for generation in generations) >= 96
    assert_states_equal_hugging_face(generations, hugging_face, plan)


def test_samples_of_a_prompt_come_together(engine, hugging_face):
    prompts = random_prompts([20, 5, 33, 12, 8])
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    answers = dict(engine.stream(prompts, params, PLAN, max_in_flight=3))
    assert [len(answers[number]) for number in range(5)] == [3] * 5
    flat = [generation for number in range(5) for generation in answers[number]]
    assert_states_equal_hugging_face(flat, hugging_face, PLAN)


def test_other_calls_wait_until_a_stream_has_ended(engine):
    stream = engine.stream(random_prompts([5] * 20), SAMPLING, PLAN, max_in_flight=16)
    next(stream)
    with pytest.raises(ValueError, match="unfinished requests"):
        engine.generate(random_prompts([5]), SAMPLING, PLAN)
    assert len(list(stream)) == 19


def test_requests_that_somebody_aborts_are_missed(engine):
    stream = engine.stream(random_prompts([5] * 20), SAMPLING, PLAN, max_in_flight=16)
    next(stream)
    running = list(engine.llm.llm_engine.output_processor.request_states)
    assert running
    engine.llm.llm_engine.abort_request(running, internal=True)
    with pytest.raises(RuntimeError, match="never finished; were they aborted"):
        list(stream)
    assert held(engine)["requests"] == 0


def test_a_model_streams_texts(model):
    texts = [f"The number after {number} is" for number in range(12)]
    answers = dict(model.stream((text for text in texts), max_in_flight=5))
    together = model.capture(texts)
    assert [answers[number].text for number in range(12)] == [generation.text for generation in together]
    assert [answers[number].prompt for number in range(12)] == texts
    assert answers[0].hidden_states.tokens == model.plan.tokens


def test_a_model_names_the_prompts_that_it_refuses(chat_model):
    answered = []
    with pytest.raises(ValueError, match="1 prompts were not answered .prompt 1: prompt '' is empty"):
        for number, _ in chat_model.stream(["Who?", "", "What?"]):
            answered.append(number)
    assert sorted(answered) == [0, 2]


@pytest.mark.parametrize("max_in_flight", [0, -1, 2.5, True])
def test_a_wrong_number_in_flight_is_an_error(engine, max_in_flight):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        engine.stream([[1]], SAMPLING, PLAN, max_in_flight=max_in_flight)


def test_one_text_is_not_an_iterable_of_prompts(engine):
    with pytest.raises(ValueError, match="give an iterable of prompts"):
        engine.stream("Hello", SAMPLING, PLAN)


def test_a_seed_is_refused_where_vllm_would_die_of_it(engine):
    params = SamplingParams(seed=1, temperature=1.0, max_tokens=4)
    with pytest.raises(ValueError, match="seed=1: vLLM on the CPU cannot prefill a seeded request in chunks"):
        engine.stream([[1]], params, PLAN)


def test_an_empty_iterable_is_an_empty_stream(engine):
    assert list(engine.stream([], SAMPLING, PLAN)) == []


def test_a_model_streams_what_its_plan_asks_for(engine):
    model = HiddenStatesModel.from_llm(engine.llm, layers=[1], tokens="last_prompt", max_new_tokens=2, verbose=False)
    assert {number: answer.hidden_states.values.shape for number, answer in model.stream(["a", "b"])} == {
        0: (1, 1, 576),
        1: (1, 1, 576),
    }
