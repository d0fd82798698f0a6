"""States are complete and each request's own, whatever vLLM's scheduler does."""

import itertools
import subprocess
import sys

import pytest
import torch
from conftest import ENGINE_OPTIONS, TINY_OPTIONS
from peft import LoraConfig, PeftModel, get_peft_model
from reference import (
    assert_states_equal_hugging_face,
    firsts,
    held,
    random_prompts,
    reference_states,
    relative_error,
)
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from polygraph_hs import CaptureEngine, CapturePlan, IncompleteCaptureError

LAYERS = (0, 15, -1)
SELECTIONS = ("last_prompt", "generated", "prompt", "all")
# Every selection, a pooling, and a request that captures nothing.
PLANS = [*(CapturePlan(LAYERS, tokens) for tokens in SELECTIONS), CapturePlan((3, -1), "all", "mean"), None]


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def assert_each_equals_hugging_face(groups, hugging_face, plans) -> None:
    for generations, plan in zip(groups, plans, strict=True):
        if plan is None:
            assert [generation.hidden_states for generation in generations] == [None] * len(generations)
        else:
            assert_states_equal_hugging_face(generations, hugging_face, plan)


NOTHING = {"requests": 0, "rows": 0, "parcels": 0}


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test the shared engine's worker keeps no row."""
    yield
    if "engine" in request.fixturenames:
        assert held(request.getfixturevalue("engine")) == NOTHING


def metric(engine, name: str) -> int:
    return sum(entry.value for entry in engine.llm.get_metrics() if entry.name == name)


@pytest.mark.parametrize("tokens", SELECTIONS)
def test_prompts_that_share_a_system_prompt(engine, hugging_face, tokens):
    system = random_prompts([100], seed=20)[0]
    prompts = [system + tail for tail in random_prompts([5, 40, 9, 33], seed=21)]
    plan = CapturePlan(LAYERS, tokens)
    engine.llm.reset_prefix_cache()
    # The first fills the cache, the others, in one batch, find it.
    generations = firsts([*engine.generate(prompts[:1], greedy(), plan), *engine.generate(prompts[1:], greedy(), plan)])
    assert_states_equal_hugging_face(generations, hugging_face, plan)
    # Where the prompt's states are asked for, the cache is shared within a call.
    first = 96 if tokens in ("last_prompt", "generated") else 0
    assert [generation.num_cached_tokens for generation in generations] == [0, first, 96, 96]


@pytest.mark.parametrize("tokens", SELECTIONS)
def test_identical_prompts_in_one_batch_and_in_a_second_call(engine, hugging_face, tokens):
    prompts = random_prompts([70], seed=22) * 6
    plan = CapturePlan(LAYERS, tokens)
    engine.llm.reset_prefix_cache()
    first, second = (firsts(engine.generate(prompts, greedy(), plan)) for _ in range(2))
    assert_states_equal_hugging_face([*first, *second], hugging_face, plan)
    first_of_call = 64 if tokens in ("last_prompt", "generated") else 0
    assert [generation.num_cached_tokens for generation in second] == [first_of_call, *[64] * 5]


@pytest.mark.parametrize("tokens", SELECTIONS)
def test_a_prompt_that_extends_an_earlier_one_with_its_answer(engine, hugging_face, tokens):
    plan = CapturePlan(LAYERS, tokens)
    engine.llm.reset_prefix_cache()
    (first,) = firsts(engine.generate(random_prompts([50], seed=23), greedy(30), plan))
    extended = first.prompt_token_ids + first.token_ids + random_prompts([20], seed=24)[0]
    (second,) = firsts(engine.generate([extended], greedy(), plan))
    assert_states_equal_hugging_face([first, second], hugging_face, plan)
    # 50 + 29 tokens were computed: two blocks of 32 can be found again, the second with generated tokens in it.
    assert second.num_cached_tokens == (64 if tokens in ("last_prompt", "generated") else 0)
    # In one call, where the longer prompt has to wait for room, it finds the shorter one's answer too.
    others = random_prompts([3] * 7, seed=28)
    prompts = [first.prompt_token_ids, *others, extended]
    sampling = [greedy(30), *[greedy(40)] * 7, greedy()]
    third = firsts(engine.generate(prompts, sampling, plan))
    assert third[0].token_ids == first.token_ids
    # The selections that need no prompt find the second call's three blocks.
    assert third[-1].num_cached_tokens == (96 if tokens in ("last_prompt", "generated") else 64)
    assert_states_equal_hugging_face(third, hugging_face, plan)


def test_a_prompt_that_is_wholly_cached_still_has_its_last_state(engine, hugging_face):
    prompt = random_prompts([64], seed=25)
    plan = CapturePlan(LAYERS, "last_prompt")
    engine.generate(prompt, greedy(), None)
    (generation,) = firsts(engine.generate(prompt, greedy(), plan))
    assert generation.num_cached_tokens == 32
    assert_states_equal_hugging_face([generation], hugging_face, plan)


def test_a_cached_prefix_whose_states_nobody_kept_is_not_read_for_them(engine, hugging_face):
    prompt = random_prompts([70], seed=26)[0]
    engine.llm.reset_prefix_cache()
    engine.generate([prompt], greedy(), None)
    groups = engine.generate([prompt] * len(PLANS), greedy(), PLANS)
    assert_each_equals_hugging_face(groups, hugging_face, PLANS)
    # The third request computes the prompt, the fourth and fifth borrow its rows; the others find the first call's.
    assert [group[0].num_cached_tokens for group in groups] == [64, 64, 0, 64, 64, 64]


@pytest.mark.parametrize("tokens", SELECTIONS)
def test_samples_share_their_prompt(engine, hugging_face, tokens):
    plan = CapturePlan(LAYERS, tokens)
    sampling = SamplingParams(n=4, temperature=1.0, max_tokens=6, ignore_eos=True)
    groups = engine.generate(random_prompts([70, 100], seed=29), sampling, plan)
    assert_each_equals_hugging_face(groups, hugging_face, [plan] * 2)
    assert groups[0][0].num_cached_tokens == 64


def test_a_request_that_must_not_read_the_cache_does_not(engine, hugging_face):
    plan = CapturePlan(LAYERS, "all")
    generations = firsts(
        engine.generate(random_prompts([70], seed=38) * 3, greedy(skip_reading_prefix_cache=True), plan)
    )
    assert [generation.num_cached_tokens for generation in generations] == [0, 0, 0]
    assert_states_equal_hugging_face(generations, hugging_face, plan)


def test_requests_with_different_plans_and_with_none_in_one_batch(engine, hugging_face):
    plans = PLANS * 4
    prompts = random_prompts([1, 33, 64, 100, 5, 7, 12, 90] * 3, seed=27)
    sampling = [greedy(max_tokens) for max_tokens in range(1, 25)]
    groups = engine.generate(prompts, sampling, plans)
    assert [len(group[0].token_ids) for group in groups] == list(range(1, 25))
    assert_each_equals_hugging_face(groups, hugging_face, plans)


def test_several_calls_in_a_row_of_other_sizes(engine, hugging_face):
    for number, count in enumerate((1, 12, 3, 1)):
        plan = PLANS[number]
        prompts = random_prompts([10 + 13 * number] * count, seed=30 + number)
        assert_states_equal_hugging_face(firsts(engine.generate(prompts, greedy(), plan)), hugging_face, plan)


def test_two_engines_in_one_process_keep_to_themselves(engine, hugging_face, tiny_engine, tiny_hugging_face):
    plan, prompts = CapturePlan((0, 2, -1), "all"), random_prompts([9, 40], seed=35)
    for _ in range(2):
        for one, reference in ((engine, hugging_face), (tiny_engine, tiny_hugging_face)):
            assert_states_equal_hugging_face(firsts(one.generate(prompts, greedy(), plan)), reference, plan)


def test_a_stop_string_ends_a_sequence_and_its_states(engine, hugging_face):
    plan = CapturePlan(LAYERS, "all")
    (whole,) = firsts(engine.generate(random_prompts([30], seed=40), greedy(24), plan))
    word = whole.text[len(whole.text) // 2 :][:6]
    for options in ({}, {"include_stop_str_in_output": True}):
        (generation,) = firsts(engine.generate([whole.prompt_token_ids], greedy(24, stop=[word], **options), plan))
        assert generation.finish_reason == "stop"
        assert generation.token_ids == whole.token_ids[: len(generation.token_ids)]
        assert 0 < len(generation.token_ids) < 24
        assert_states_equal_hugging_face([generation], hugging_face, plan)


def test_a_stop_token_ends_a_sequence_and_its_states(engine, hugging_face):
    plan = CapturePlan(LAYERS, "generated")
    prompts = random_prompts([30, 41, 9], seed=41)
    whole = firsts(engine.generate(prompts, greedy(16), None))
    for position in (0, 5):
        sampling = [greedy(16, stop_token_ids=[generation.token_ids[position]]) for generation in whole]
        generations = firsts(engine.generate(prompts, sampling, plan))
        assert {generation.finish_reason for generation in generations} == {"stop"}
        assert all(len(generation.token_ids) <= position + 1 for generation in generations)
        assert_states_equal_hugging_face(generations, hugging_face, plan)


def test_the_end_of_sequence_token_min_tokens_and_ignore_eos(engine, hugging_face):
    tokenizer = engine.llm.get_tokenizer()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    plan = CapturePlan(LAYERS, "generated")
    sampling = [greedy(20, ignore_eos=False), greedy(20, ignore_eos=False, min_tokens=14), greedy(20)]
    stopped, longer, ignoring = firsts(engine.generate([chat] * 3, sampling, plan))
    assert (stopped.finish_reason, stopped.token_ids[-1]) == ("stop", tokenizer.eos_token_id)
    assert len(longer.token_ids) >= 14 > len(stopped.token_ids)
    assert len(ignoring.token_ids) == 20
    assert_states_equal_hugging_face([stopped, longer, ignoring], hugging_face, plan)


@pytest.mark.parametrize("tokens", SELECTIONS)
def test_samples_of_several_prompts_in_chunks(engine, hugging_face, tokens):
    plan = CapturePlan(LAYERS, tokens)
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    groups = engine.generate(random_prompts([1, 40, 75, 8], seed=42), sampling, plan)
    # Greedy decoding would make one answer a prompt, four in all.
    assert len({tuple(sample.token_ids) for samples in groups for sample in samples}) > 6
    for samples in groups:
        assert len(samples) == 3
        assert_states_equal_hugging_face(samples, hugging_face, plan)


def test_seeds_give_the_same_samples_and_states_again(engine, hugging_face):
    plan = CapturePlan(LAYERS, "all")
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=7)
    first, second = (engine.generate(random_prompts([10], seed=43), sampling, plan)[0] for _ in range(2))
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in second]
    assert len({tuple(sample.token_ids) for sample in first}) == 3
    assert_states_equal_hugging_face([*first, *second], hugging_face, plan)


def test_a_seed_that_would_end_vllms_engine_is_an_error_before(engine):
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6, seed=7)
    with pytest.raises(
        ValueError, match="seed=7 with 33 prompt tokens.*max_num_batched_tokens, now 32, to at least 33"
    ):
        engine.generate(random_prompts([11]), sampling, CapturePlan((15,)))


def test_texts_and_token_ids_in_one_call(engine, hugging_face):
    plan = CapturePlan(LAYERS, "all")
    text = "The capital of France is"
    token_ids = engine.llm.get_tokenizer()(text)["input_ids"]
    generations = firsts(engine.generate([text, token_ids], greedy(), plan))
    assert [generation.prompt for generation in generations] == [text, token_ids]
    assert [generation.prompt_token_ids for generation in generations] == [token_ids, token_ids]
    assert_states_equal_hugging_face(generations, hugging_face, plan)


CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
]


def test_chat(engine, hugging_face):
    groups = engine.chat(CHATS, greedy(), PLANS[2:4])
    assert groups[0][0].text.startswith("The capital of France is Paris.")
    assert [group[0].prompt for group in groups] == CHATS
    assert_each_equals_hugging_face(groups, hugging_face, PLANS[2:4])


def test_vllms_own_generate_and_chat_called_by_the_user(engine, hugging_face):
    for call, prompts in ((engine.llm.generate, ["Paris is", "One, two,"]), (engine.llm.chat, CHATS)):
        requests = [engine.prepare(greedy(), plan) for plan in PLANS[3:5]]
        outputs = call(prompts, requests, use_tqdm=False)
        assert_each_equals_hugging_face(engine.collect(outputs, requests), hugging_face, PLANS[3:5])


def test_one_prepared_request_for_two_prompts_is_an_error_naming_them(engine):
    request = engine.prepare(greedy(), CapturePlan((15,)))
    outputs = engine.llm.generate(["Paris is", "Rome is"], request, use_tqdm=False)
    with pytest.raises(IncompleteCaptureError, match=r"prompt 0: 2 requests \(.*\) carry its capture arguments"):
        engine.collect(outputs, [request, request])


def test_states_can_be_collected_once(engine):
    requests = [engine.prepare(greedy(), CapturePlan((15,)))]
    outputs = engine.llm.generate(["Paris is"], requests, use_tqdm=False)
    engine.collect(outputs, requests)
    with pytest.raises(IncompleteCaptureError, match="prompt 0: its request never reached this worker"):
        engine.collect(outputs, requests)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": "last"}, ValueError, "tokens='last' is not a token selection"),
        ({"key": 7}, ValueError, "'key': 7.* is not what polygraph_hs.spec.request_args makes"),
        ({"n": 2}, IncompleteCaptureError, "prompt 0, sample 0: its request never reached this worker"),
    ],
)
def test_capture_arguments_that_make_no_sense_cost_their_own_request_alone(
    engine, hugging_face, change, error, message
):
    plan = CapturePlan((15,), "all")
    requests = [engine.prepare(greedy(), plan), engine.prepare(greedy(), plan)]
    requests[0].extra_args["polygraph_hs"].update(change)
    outputs = engine.llm.generate(["Paris is", "Rome is"], requests, use_tqdm=False)
    with pytest.raises(error, match=message):
        engine.collect(outputs[:1], requests[:1])
    assert_states_equal_hugging_face(firsts(engine.collect(outputs[1:], requests[1:])), hugging_face, plan)


def test_outputs_that_do_not_fit_their_requests(engine):
    with pytest.raises(ValueError, match="0 outputs came for 1 requests"):
        engine.collect([], [engine.prepare(greedy(), CapturePlan((15,)))])
    with pytest.raises(ValueError, match="plan has 3 entries for 2 prompts"):
        engine.generate(["a", "b"], greedy(), PLANS[:3])


def test_a_call_beside_unfinished_requests_of_the_users_own_is_an_error(engine):
    engine.llm.enqueue(["Paris is"], greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="this engine has 1 unfinished requests of the caller's own"):
        engine.generate(["Rome is"], greedy(), CapturePlan((15,)))
    (output,) = engine.llm.wait_for_completion(use_tqdm=False)
    assert output.finished


def test_an_interrupted_call_leaves_nothing_in_the_engine_or_its_worker(engine, hugging_face, monkeypatch):
    plan = CapturePlan(LAYERS, "all")
    prompts = random_prompts([200] * 12, seed=50)
    core = engine.llm.llm_engine
    step, steps = core.step, itertools.count()

    def interrupted_step():
        if next(steps) == 20:
            # What Ctrl-C does to this process, but always at the same moment, and in the background too, where a
            # shell has SIGINT ignored.
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, SamplingParams(n=2, temperature=1, max_tokens=250, ignore_eos=True), plan)
    monkeypatch.undo()
    assert engine.llm.llm_engine.get_num_unfinished_requests() == 0
    assert held(engine) == NOTHING
    short = random_prompts([20], seed=51)
    assert_states_equal_hugging_face(firsts(engine.generate(short, greedy(), plan)), hugging_face, plan)


def test_a_request_that_the_user_aborts_is_freed_and_others_stay_right(engine, hugging_face):
    plan = CapturePlan(LAYERS, "all")
    requests = [engine.prepare(greedy(12), plan) for _ in range(3)]
    core = engine.llm.llm_engine
    prompts = random_prompts([40, 30, 60], seed=52)
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        core.add_request(f"mine-{number}", {"prompt_token_ids": prompt}, request)
    outputs = {}
    for step in range(10_000):
        if step == 6:
            assert held(engine)["requests"] > 0
            core.abort_request(["mine-1"])
            engine.discard(requests[1:2])
        if not core.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in core.step() if output.finished}
    assert sorted(outputs) == ["mine-0", "mine-2"]
    assert held(engine)["requests"] == 2
    groups = engine.collect([outputs["mine-0"], outputs["mine-2"]], requests[::2])
    assert_states_equal_hugging_face(firsts(groups), hugging_face, plan)


@pytest.fixture(scope="module")
def crowded_engine(smollm2):
    """A KV cache of four usable blocks, for six sequences of which each comes to need a second one."""
    options = {"max_model_len": 256, "block_size": 128, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 5}
    return CaptureEngine.start(
        smollm2, range(31), enforce_eager=True, disable_log_stats=False, **{**ENGINE_OPTIONS, **options}
    )


@pytest.mark.parametrize("plan", [PLANS, *PLANS[:5]], ids=["mixed", *SELECTIONS, "mean"])
def test_preempted_and_recomputed_requests(crowded_engine, hugging_face, plan):
    before = metric(crowded_engine, "vllm:num_preemptions")
    prompts = random_prompts([105, 110, 113, 117, 121, 125], seed=60)
    groups = crowded_engine.generate(prompts, greedy(28), plan)
    assert metric(crowded_engine, "vllm:num_preemptions") > before
    assert_each_equals_hugging_face(groups, hugging_face, plan if plan is PLANS else [plan] * 6)


@pytest.fixture(scope="module")
def drafting_engine(smollm2):
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return CaptureEngine.start(
        smollm2,
        range(31),
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafts,
        **ENGINE_OPTIONS,
    )


def test_rejected_drafts_leave_no_row(drafting_engine, hugging_face):
    # Text that repeats itself, so that some drafts are right, and text that does not, so that some are wrong.
    prompts = [(prompt * 4)[:90] for prompt in random_prompts([7, 11, 20], seed=61)] + random_prompts([60] * 3, seed=62)
    groups = drafting_engine.generate(prompts, greedy(40), PLANS)
    assert_each_equals_hugging_face(groups, hugging_face, PLANS)
    for plan in PLANS[:5]:
        groups = drafting_engine.generate(prompts, greedy(13), plan)
        assert_states_equal_hugging_face(firsts(groups), hugging_face, plan)
    accepted = metric(drafting_engine, "vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < metric(drafting_engine, "vllm:spec_decode_num_draft_tokens")


@pytest.fixture(scope="module")
def adapters(tiny_llama, tmp_path_factory) -> list[str]:
    """Two LoRA adapters of the tiny Llama that change it visibly."""
    paths = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        config = LoraConfig(
            r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], init_lora_weights=False
        )
        paths.append(str(tmp_path_factory.mktemp("adapter")))
        get_peft_model(base, config).save_pretrained(paths[-1])
    return paths


def test_lora_requests_beside_requests_without_an_adapter(tiny_llama, tiny_hugging_face, adapters):
    # A slot more than adapters: vLLM's CPU kernels put requests without an adapter through the last slot's.
    engine = CaptureEngine.start(
        tiny_llama, range(5), enforce_eager=True, enable_lora=True, max_loras=3, max_lora_rank=8, **TINY_OPTIONS
    )
    first, second = (LoRARequest(f"adapter-{i}", i, path) for i, path in enumerate(adapters, start=1))
    references = {None: tiny_hugging_face}
    for request in (first, second):
        base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        references[request] = PeftModel.from_pretrained(base, request.lora_path)
    plan = CapturePlan((0, 2, -1), "all")
    # The same tokens with each adapter and without: their states differ, and so do their cached prefixes.
    prompts = random_prompts([70], seed=63) * 6
    loras = [first, None, second, first, None, second]
    for _ in range(2):
        groups = engine.generate(prompts, greedy(), plan, lora_request=loras)
        for generation, lora in zip(firsts(groups), loras, strict=True):
            assert_states_equal_hugging_face([generation], references[lora], plan)
    one, other = (groups[i][0].hidden_states.select(2, "prompt") for i in (0, 1))
    assert ((one - other).norm() / other.norm()).item() > 0.05


SCRIPT = """
import sys
import torch
from sklearn.linear_model import LogisticRegression

torch.nn.Linear(512, 512)(torch.randn(4096, 512)).sum().backward()
LogisticRegression().fit(torch.randn(200, 64).numpy(), [0, 1] * 100)

from polygraph_hs import CaptureEngine, CapturePlan
from vllm import SamplingParams

print("the script runs")
engine = CaptureEngine.start(sys.argv[1], [2], dtype="float32", max_model_len=256, enforce_eager=True,
                             kv_cache_memory_bytes=2**28)
plan = CapturePlan((2,), "all")
(generation,) = engine.generate(["Paris is the capital of"], SamplingParams(temperature=0, max_tokens=4), plan)[0]
torch.save([generation.prompt_token_ids, generation.token_ids, generation.hidden_states.values], sys.argv[2])
"""


def test_a_script_without_a_main_guard_that_used_torch_before(tiny_llama, tiny_hugging_face, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), tiny_llama, str(tmp_path / "states.pt")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert output.returncode == 0, output.stderr[-2000:]
    # The engine's processes did not run the script again.
    assert output.stdout.count("the script runs") == 1
    prompt_ids, generated_ids, values = torch.load(tmp_path / "states.pt")
    reference = reference_states(tiny_hugging_face, prompt_ids + generated_ids)[2:3]
    assert relative_error(values, reference) < 1e-4
