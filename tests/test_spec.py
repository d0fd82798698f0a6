"""Plans: layers, unions, and what a plan needs."""

import numpy as np
import pytest
import torch

from polygraph_hs import CapturePlan, HiddenStates, IncompleteCaptureError, LayerNotTappedError
from polygraph_hs.spec import ranges, resolve_layers, token_span


def test_layers_are_hugging_faces_indices():
    assert resolve_layers([-1, 0, 12, 12, -13], 12) == (0, 12)


@pytest.mark.parametrize(
    ("one", "other", "union"),
    [
        ("last_prompt", "last_prompt", "last_prompt"),
        ("last_prompt", "generated", "generated"),
        ("prompt", "last_prompt", "prompt"),
        ("prompt", "generated", "all"),
        ("all", "last_prompt", "all"),
        ("generated", "all", "all"),
    ],
)
def test_a_union_is_the_smallest_selection_that_serves_both(one, other, union):
    joined = CapturePlan((1,), one).union(CapturePlan((3,), other))
    assert joined == CapturePlan((1, 3), union)
    start, stop = token_span(union, 5, 4)
    for tokens in (one, other):
        assert start <= token_span(tokens, 5, 4)[0] and token_span(tokens, 5, 4)[1] <= stop


def test_a_union_keeps_a_pooling_only_if_both_have_it():
    mean = CapturePlan((1,), "all", "mean")
    assert mean.union(CapturePlan((2,), "all", "mean")).pooling == "mean"
    assert mean.union(CapturePlan((2,), "all")).pooling == "none"
    assert mean.union(CapturePlan((2,), "prompt", "mean")).pooling == "none"


@pytest.fixture
def states():
    """Prompt 3, generated 2, layers 1 and 4 of 4; the state at position p of layer l is 10 l + p."""
    values = torch.tensor([[[10.0 * layer + p] for p in range(4)] for layer in (1, 4)])
    return HiddenStates(values, (1, 4), np.arange(4), 3, 2, 4, "all", "none")


@pytest.mark.parametrize(
    ("tokens", "pooling", "expected"),
    [
        ("last_prompt", "none", [[42.0]]),
        ("generated", "none", [[42.0], [43.0]]),
        ("prompt", "none", [[40.0], [41.0], [42.0]]),
        ("all", "mean", [41.5]),
        ("generated", "mean", [42.5]),
        ("prompt", "last", [42.0]),
    ],
)
def test_features_of_a_narrower_selection(states, tokens, pooling, expected):
    assert states.select(-1, tokens, pooling).tolist() == expected


def test_states_that_were_not_captured_are_an_error(states):
    with pytest.raises(LayerNotTappedError, match=r"layer=2 was not captured; this sequence has layers \[1, 4\]"):
        states.select(2)
    with pytest.raises(ValueError, match="layer=5 does not exist"):
        states.select(5)
    narrow = HiddenStates(states.values[:, 2:], (1, 4), np.array([2, 3]), 3, 2, 4, "generated", "none")
    with pytest.raises(IncompleteCaptureError, match="tokens='prompt' means positions 0 to 2.*tokens='generated' was"):
        narrow.select(1, "prompt")
    pooled = HiddenStates(states.values[:, :1], (1, 4), np.array([-1]), 3, 2, 4, "all", "mean")
    assert pooled.select(1, "all", "mean").tolist() == [10.0]
    with pytest.raises(IncompleteCaptureError, match="capture with pooling='none'"):
        pooled.select(1, "generated", "mean")


def test_ranges_of_numbers_in_few_words():
    assert ranges([]) == "none"
    assert ranges([4]) == "4"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(range(0, 14, 2)) == "0, 2, 4, 6, 8 and 2 more ranges"
