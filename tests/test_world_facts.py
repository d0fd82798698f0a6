"""The question set and its labelling rule."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from polygraph_hs.datasets import is_wrong, load_world_facts
from polygraph_hs.datasets.world_facts import SEPARATOR, SPLITS, TOPICS

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_there_are_at_least_500_questions_in_every_topic_and_split():
    facts = load_world_facts()
    assert len(facts) >= 500
    assert facts["question"].is_unique
    assert facts.groupby(["topic", "split"]).size().min() >= 50
    assert set(facts["topic"]) == set(TOPICS) and set(facts["split"]) == set(SPLITS)
    assert sum(len(load_world_facts(split)) for split in SPLITS) == len(facts)


def test_a_split_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="split='dev' does not exist; choose one of train, test"):
        load_world_facts("dev")


def test_the_committed_file_is_what_the_script_makes(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    from make_world_facts import make_world_facts

    committed = load_world_facts()
    committed["answers"] = committed["answers"].str.join(SEPARATOR)
    pd.testing.assert_frame_equal(make_world_facts(), committed, check_dtype=False)


def test_sums_are_right():
    for _, fact in load_world_facts().query("topic == 'sum'").iterrows():
        first, second = (int(word) for word in fact["question"].rstrip("?").split() if word.isdigit())
        assert fact["answers"] == [str(first + second)]


def test_no_question_contains_its_answer():
    facts = load_world_facts()
    assert all(is_wrong(*row) for row in zip(facts["question"], facts["answers"], facts["topic"], strict=True))


@pytest.mark.parametrize(
    ("text", "answers", "topic", "wrong"),
    [
        ("The capital is paris.", ["Paris"], "capital", False),
        ("The capital is Parisian.", ["Paris"], "capital", True),
        ("It is San José!", ["San José", "San Jose"], "capital", False),
        ("It is San Jose", ["San José", "San Jose"], "capital", False),
        ("The symbol is Co.", ["Co"], "element symbol", False),
        ("The symbol is CO.", ["Co"], "element symbol", True),
        ("Cobalt", ["Co"], "element symbol", True),
        ("12 plus 31 is 43.", ["43"], "sum", False),
        ("12 plus 31 is 143.", ["43"], "sum", True),
        ("", ["43"], "sum", True),
    ],
)
def test_an_answer_is_right_if_an_accepted_one_stands_in_it_as_whole_words(text, answers, topic, wrong):
    assert is_wrong(text, answers, topic) == wrong
