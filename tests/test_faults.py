"""An injected fault ends in an error that names the request, and a live engine's next call is right."""

import os
import signal
import threading

import pytest
from conftest import TINY_OPTIONS
from reference import assert_states_equal_hugging_face, drop_a_row, firsts, random_prompts
from vllm import SamplingParams

import polygraph_hs.engine
from polygraph_hs import CaptureEngine, CapturePlan, EngineDiedError, IncompleteCaptureError

PLAN = CapturePlan((0, 2, -1), "all")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def start(tiny_llama):
    return CaptureEngine.start(tiny_llama, [0, 2, -1], enforce_eager=True, **TINY_OPTIONS)


@pytest.fixture(scope="module")
def open_engine(tiny_llama):
    """An engine whose worker takes code, so that a test can break it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield start(tiny_llama)


@pytest.fixture
def breakable(open_engine, tiny_hugging_face):
    """The engine; after the test its worker keeps nothing, and its next call is right."""
    yield open_engine
    assert open_engine.llm.collective_rpc("capture_held") == [{"requests": 0, "rows": 0, "parcels": 0}]
    generations = open_engine.generate(random_prompts([9, 40], seed=81), GREEDY, PLAN)
    assert_states_equal_hugging_face(firsts(generations), tiny_hugging_face, PLAN)


def test_a_row_that_the_recorder_lost(breakable):
    breakable.llm.collective_rpc(drop_a_row)
    with pytest.raises(
        IncompleteCaptureError,
        match=r"1 of 3 captured sequences are incomplete.* prompt 0: 1 of 27 positions never arrived \(1\) for layers",
    ):
        breakable.generate(random_prompts([20, 30, 5], seed=80), GREEDY, PLAN)


def test_a_row_that_the_recorder_lost_of_one_of_several_samples(breakable):
    breakable.llm.collective_rpc(drop_a_row)
    sampling = SamplingParams(n=2, temperature=1.0, max_tokens=4, ignore_eos=True)
    with pytest.raises(IncompleteCaptureError, match=r"1 of 2 captured.* prompt 0, sample 0: 1 of 13 positions"):
        breakable.generate(random_prompts([10], seed=80), sampling, PLAN)


def test_an_error_names_the_prompt_as_the_caller_counts(breakable):
    breakable.llm.collective_rpc(drop_a_row)
    with pytest.raises(IncompleteCaptureError, match=r" prompt 1: 1 of 27 positions never arrived \(1\) for layers"):
        # The first does not fit the window, and is not among the requests that vLLM gets.
        breakable.generate(random_prompts([600, 20], seed=80), GREEDY, PLAN)


def shrink_the_next_memory(worker) -> None:
    """Let the operating system give the next delivery half of the memory that it asks for."""
    from polygraph_hs.capture import delivery

    worker.capture.pool.idle.clear()

    class HalfSized:
        def __getattr__(self, name):
            return getattr(os, name)

        def ftruncate(self, fd, size):
            os.ftruncate(fd, size // 2)
            delivery.os = os

    delivery.os = HalfSized()


def test_a_delivery_buffer_that_is_too_small(breakable):
    breakable.llm.collective_rpc(shrink_the_next_memory)
    with pytest.raises(
        IncompleteCaptureError, match=r"the states of prompts 0-2 could not be handed over: .*file size"
    ):
        breakable.generate(random_prompts([20, 30, 5], seed=80), GREEDY, PLAN)


def test_bytes_that_come_over_rpc_incomplete(breakable, monkeypatch):
    # As where the driver cannot map the worker's memory, and a piece is lost on the way.
    monkeypatch.setattr(polygraph_hs.engine, "open_group", lambda description, number: None)
    fetch = CaptureEngine._fetch
    monkeypatch.setattr(CaptureEngine, "_fetch", lambda self, *args: fetch(self, *args)[:-64])
    with pytest.raises(
        IncompleteCaptureError, match=r"the states of prompts 0-1 could not be handed over.*bytes where"
    ):
        breakable.generate(random_prompts([20, 30], seed=80), GREEDY, PLAN)
    monkeypatch.undo()


def test_replies_that_are_not_read_any_more(open_engine, monkeypatch):
    # Last of those that use the engine, which it ends. vLLM's reading thread ends at a reply that it cannot decode, and
    # vLLM would wait for replies without end.
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    prompts = random_prompts([20, 30], seed=80)
    with pytest.raises(EngineDiedError, match="while the states of prompts 0-1 were handed over") as raised:
        open_engine.generate(prompts, GREEDY, PLAN)
    assert "custom utility result types" in str(raised.value.__cause__.__cause__)
    with pytest.raises(EngineDiedError, match="start a new one"):
        open_engine.generate(prompts, GREEDY, PLAN)


def test_a_worker_that_is_killed_while_it_generates(tiny_llama, tiny_engine, tiny_hugging_face):
    engine = start(tiny_llama)
    (pid,) = engine.llm.collective_rpc("capture_process_id")
    timer = threading.Timer(2.0, os.kill, (pid, signal.SIGKILL))
    timer.start()
    endless = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
    with pytest.raises(EngineDiedError, match=r"while prompts [0-9-]+ of 40 were not finished.*Start a new one"):
        engine.generate(random_prompts([20] * 40, seed=80), endless, PLAN)
    with pytest.raises(EngineDiedError):
        engine.generate(random_prompts([20], seed=80), GREEDY, PLAN)
    # Another engine of the same process goes on.
    generations = tiny_engine.generate(random_prompts([9], seed=81), GREEDY, PLAN)
    assert_states_equal_hugging_face(firsts(generations), tiny_hugging_face, PLAN)
