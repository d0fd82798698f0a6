"""lm-polygraph's own estimate_uncertainty() and UEManager take the model, unmodified, from one pass."""

import subprocess
import sys

import lm_polygraph
import numpy as np
import pytest
import torch
from lm_polygraph import estimate_uncertainty
from lm_polygraph.estimators import (
    MahalanobisDistanceSeq,
    MaximumSequenceProbability,
    MeanTokenEntropy,
    Perplexity,
)
from lm_polygraph.estimators.estimator import Estimator
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.manager import UEManager
from reference import reference_log_likelihoods
from scipy.stats import entropy

from polygraph_hs.datasets import is_wrong, load_world_facts
from polygraph_hs.estimators import LinearProbe, MahalanobisDistance
from polygraph_hs.stat_calculators import all_stat_calculators
from polygraph_hs.stat_calculators.alternatives import AlternativesCalculator

TEXTS = [
    "What is the capital of Japan?",
    "What is the capital of Norfolk Island?",
    "What is the chemical symbol for gold?",
    "What is 12 plus 31?",
]


@pytest.fixture
def fitted(chat_model):
    """A probe and a distance, fitted on real answers to real questions."""
    facts = load_world_facts("train").groupby("topic").head(12)
    probe, distance = LinearProbe(15), MahalanobisDistance(15, tokens="generated", pooling="mean")
    answers = chat_model.capture(list(facts["question"]), 12)
    rows = zip(answers, facts["answers"], facts["topic"], strict=True)
    wrong = [is_wrong(answer.text, accepted, topic) for answer, accepted, topic in rows]
    states = [answer.hidden_states for answer in answers]
    return [probe.fit(states, wrong), distance.fit(states)]


def run_manager(model, estimators, texts=TEXTS, batch_size=4) -> UEManager:
    manager = UEManager(
        Dataset(texts, [""] * len(texts), batch_size=batch_size),
        model,
        estimators,
        BuilderEnvironmentStatCalculator(model),
        all_stat_calculators(),
        [],
        [],
        [],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=model.generation_parameters.max_new_tokens,
        save_stats=["greedy_log_likelihoods", "input_tokens", "hidden_states", "greedy_tokens_alternatives"],
    )
    manager()
    return manager


def test_estimate_uncertainty_gives_the_numbers_of_a_manager_batch(chat_model, fitted):
    assert estimate_uncertainty is lm_polygraph.utils.estimate_uncertainty
    estimators = [*fitted, MaximumSequenceProbability(), Perplexity(), MeanTokenEntropy()]
    manager = run_manager(chat_model, estimators)
    for estimator in estimators:
        batch = manager.estimations["sequence", str(estimator)]
        assert len(set(batch)) == len(TEXTS)
        for text, greedy_text, expected in zip(TEXTS, manager.stats["greedy_texts"], batch, strict=True):
            output = estimate_uncertainty(chat_model, estimator, text)
            assert output.uncertainty == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert output.generation_text == greedy_text


def test_a_manager_run_is_one_request_a_text(chat_model, fitted):
    before = chat_model.engine.num_requests_processed()
    estimators = [*fitted, MaximumSequenceProbability(), Perplexity(), MeanTokenEntropy()]
    run_manager(chat_model, estimators, batch_size=2)
    assert chat_model.engine.num_requests_processed() - before == len(TEXTS)


def test_logprob_estimators_are_the_arithmetic_on_hugging_faces_log_likelihoods(chat_model, hugging_face):
    manager = run_manager(chat_model, [MaximumSequenceProbability(), Perplexity()])
    inputs, generated = manager.stats["input_tokens"], manager.stats["greedy_tokens"]
    for number, (prompt_ids, token_ids) in enumerate(zip(inputs, generated, strict=True)):
        reference = reference_log_likelihoods(hugging_face, prompt_ids, token_ids)
        np.testing.assert_allclose(manager.stats["greedy_log_likelihoods"][number], reference, atol=1e-4)
        msp = manager.estimations["sequence", "MaximumSequenceProbability"][number]
        assert msp == pytest.approx(-reference.sum(), abs=1e-3)
        assert manager.estimations["sequence", "Perplexity"][number] == pytest.approx(-reference.mean(), abs=1e-3)


def test_mean_token_entropy_is_that_of_the_returned_probabilities(chat_model, hugging_face):
    value = estimate_uncertainty(chat_model, MeanTokenEntropy(), TEXTS[0]).uncertainty
    (generation,) = chat_model.capture(TEXTS[:1])
    with torch.no_grad():
        ids = torch.tensor([generation.prompt_token_ids + generation.token_ids])
        logits = hugging_face(ids).logits[0, len(generation.prompt_token_ids) - 1 : -1]
    top = torch.softmax(logits.float(), dim=-1).topk(20, dim=-1).values
    truncated = -(top * top.log()).sum(dim=-1).mean().item()
    assert value == pytest.approx(truncated, abs=1e-3)
    # What lies behind the 20 most probable tokens is left out.
    assert value < entropy(torch.softmax(logits, dim=-1).numpy(), axis=1).mean()


def test_alternatives_begin_with_the_generated_token(chat_model, hugging_face):
    manager = run_manager(chat_model, [SecondChoice()])
    prompts, generated = manager.stats["input_tokens"], manager.stats["greedy_tokens"]
    scores = manager.estimations["sequence", "SecondChoice"]
    alternatives = manager.stats["greedy_tokens_alternatives"]
    for prompt_ids, token_ids, steps, score in zip(prompts, generated, alternatives, scores, strict=True):
        assert [step[0][0] for step in steps] == token_ids
        with torch.no_grad():
            logits = hugging_face(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).topk(10)
        assert [[token for token, _ in step] for step in steps] == expected.indices.tolist()
        np.testing.assert_allclose([[value for _, value in step] for step in steps], expected.values, atol=1e-4)
        assert score == pytest.approx(expected.values[:, 1].sum().item(), abs=1e-3)


class SecondChoice(Estimator):
    """Asks for the alternatives, as lm-polygraph's claim-level estimators do."""

    def __init__(self):
        super().__init__(["greedy_tokens_alternatives"], "sequence")

    def __str__(self) -> str:
        return "SecondChoice"

    def __call__(self, stats: dict) -> np.ndarray:
        return np.array([sum(step[1][1] for step in steps) for steps in stats["greedy_tokens_alternatives"]])


def test_a_token_that_was_not_the_most_probable_stands_first_too():
    calculator = AlternativesCalculator(n_alternatives=3)
    stats = {
        "greedy_tokens": [[7, 9]],
        "greedy_log_likelihoods": [[-2.0, -9.0]],
        "greedy_top_tokens": [np.array([[4, 7, 5], [1, 2, 3]])],
        "greedy_log_probs": [np.array([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], dtype=np.float32)],
    }
    assert calculator(stats, [""], None)["greedy_tokens_alternatives"] == [
        [[(7, -2.0), (4, -1.0), (5, -3.0)], [(9, -9.0), (1, -1.0), (2, -2.0)]]
    ]


def test_embeddings_for_lm_polygraphs_density_estimators_come_from_the_same_pass(chat_model):
    train = run_manager(chat_model, [MahalanobisDistanceWithTrain(np.zeros((2, 576), dtype=np.float32))])
    before = chat_model.engine.num_requests_processed()
    states = train.stats["hidden_states"]
    embeddings = np.stack([state.select(-1, "all", "mean").numpy() for state in states])
    manager = run_manager(chat_model, [MahalanobisDistanceWithTrain(embeddings)], TEXTS[:3])
    assert chat_model.engine.num_requests_processed() - before == 3
    assert np.isfinite(manager.estimations["sequence", "MahalanobisDistanceSeq_decoder"]).all()


class MahalanobisDistanceWithTrain(MahalanobisDistanceSeq):
    """lm-polygraph's estimator with given training embeddings."""

    def __init__(self, train: np.ndarray):
        super().__init__("decoder")
        self.stats_dependencies = ["embeddings"]
        self.train = train

    def __call__(self, stats):
        return super().__call__({**stats, "train_embeddings_decoder": self.train})


def test_estimators_that_were_not_captured_for_say_what_to_install(chat_model):
    states = [generation.hidden_states for generation in chat_model.capture(TEXTS)]
    with pytest.raises(ValueError, match=r"layer=3 was not captured; this sequence has layers \[15\].*model.install"):
        LinearProbe(3).fit(states, [0, 1, 0, 1])


HUGGING_FACE_MODEL = """
import sys
{imports}
from lm_polygraph import WhiteboxModel, estimate_uncertainty
from lm_polygraph.estimators import MaximumSequenceProbability, Perplexity
from lm_polygraph.utils.generation_parameters import GenerationParameters
from transformers import AutoModelForCausalLM, AutoTokenizer
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
model = WhiteboxModel(network, tokenizer, path, generation_parameters=GenerationParameters(max_new_tokens=5))
for estimator in (MaximumSequenceProbability(), Perplexity()):
    output = estimate_uncertainty(model, estimator, "What is the capital of Japan?")
    print("RESULT", estimator, repr(output.uncertainty), output.generation_tokens)
"""


def test_a_hugging_face_model_gives_what_it_gave_without_this_package(tiny_llama):
    outputs = []
    for imports in ("", "import polygraph_hs.model"):
        script = HUGGING_FACE_MODEL.format(imports=imports)
        run = subprocess.run([sys.executable, "-c", script, tiny_llama], capture_output=True, text=True, check=True)
        outputs.append([line for line in run.stdout.splitlines() if line.startswith("RESULT")])
    assert len(outputs[0]) == 2
    assert outputs[0] == outputs[1]
