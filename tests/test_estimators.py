"""Estimators against scikit-learn and written-out arithmetic; bad training data and bad files."""

import json

import numpy as np
import pytest
from reference import states_like
from sklearn.covariance import ledoit_wolf
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from polygraph_hs.estimators import LinearProbe, MahalanobisDistance
from polygraph_hs.estimators.base import ARRAYS_FILE, CONFIG_FILE
from polygraph_hs.estimators.linear_probe import load_estimator as load_linear_probe
from polygraph_hs.estimators.mahalanobis_distance import load_estimator as load_mahalanobis_distance

ESTIMATORS = [LinearProbe(2, C=0.5), MahalanobisDistance(2)]


@pytest.fixture
def data():
    """60 states of width 8 with labels that depend on them; 10 more to score."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(70, 8)).astype(np.float32) * np.linspace(0.1, 5, 8, dtype=np.float32) + 3
    wrong = (values[:, 0] * 10 + values[:, 7] / 5 + rng.normal(size=70) > np.median(values[:, 0] * 10)).astype(int)
    return values[:60], wrong[:60], values[60:]


@pytest.fixture(params=ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def estimator(request):
    return type(request.param)(**{name: getattr(request.param, name) for name in request.param.PARAMETERS})


def test_linear_probe_is_scikit_learns_logistic_regression_on_standardised_states(data):
    train, wrong, test = data
    scaler = StandardScaler().fit(train.astype(np.float64))
    regression = LogisticRegression(C=0.5, max_iter=10_000).fit(scaler.transform(train.astype(np.float64)), wrong)
    probe = LinearProbe(2, C=0.5).fit(states_like(train), wrong)
    expected = regression.predict_proba(scaler.transform(test.astype(np.float64)))[:, 1]
    np.testing.assert_allclose(probe.score(states_like(test)), expected, rtol=1e-6)


def test_linear_probe_does_not_depend_on_shift_and_scale_of_the_states(data):
    train, wrong, test = data
    plain = LinearProbe(2).fit(states_like(train), wrong).score(states_like(test))
    moved = LinearProbe(2).fit(states_like(train * 4 - 2), wrong).score(states_like(test * 4 - 2))
    np.testing.assert_allclose(moved, plain, rtol=1e-4)


def test_mahalanobis_distance_is_its_formula(data):
    train, _, test = data
    covariance, _ = ledoit_wolf(train.astype(np.float64))
    difference = test - train.astype(np.float64).mean(axis=0)
    expected = [np.sqrt(row @ np.linalg.inv(covariance) @ row) for row in difference]
    scores = MahalanobisDistance(2).fit(states_like(train)).score(states_like(test))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_mahalanobis_distance_does_not_depend_on_rotation(data):
    train, _, test = data
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))
    rotation = rotation.astype(np.float32)
    plain = MahalanobisDistance(2).fit(states_like(train)).score(states_like(test))
    turned = MahalanobisDistance(2).fit(states_like(train @ rotation)).score(states_like(test @ rotation))
    np.testing.assert_allclose(turned, plain, rtol=1e-3)


def test_mahalanobis_distance_of_the_centroid_is_zero(data):
    train, _, _ = data
    distance = MahalanobisDistance(2).fit(states_like(train))
    assert distance.score(states_like(distance.location_[None].astype(np.float32)))[0] < 1e-3


def test_the_order_of_the_training_rows_does_not_matter(estimator, data):
    train, wrong, test = data
    order = np.random.default_rng(2).permutation(len(train))
    plain = estimator.fit(states_like(train), wrong).score(states_like(test))
    shuffled = estimator.fit(states_like(train[order]), wrong[order]).score(states_like(test))
    np.testing.assert_allclose(shuffled, plain, rtol=1e-4)


def test_several_layers_are_joined(data):
    train, wrong, _ = data
    probe = LinearProbe([1, 2]).fit(states_like(train), wrong)
    assert probe.coef_.shape == (16,)
    assert probe.layers_ == [1, 2]


def test_fewer_rows_than_dimensions_and_constant_features_give_finite_scores(estimator):
    rng = np.random.default_rng(3)
    values = rng.normal(size=(6, 30)).astype(np.float32)
    values[:, 4] = 1.0
    scores = estimator.fit(states_like(values), [0, 1, 0, 1, 0, 1]).score(states_like(values))
    assert scores.shape == (6,)
    assert np.isfinite(scores).all()


def test_saved_and_loaded_it_scores_identically(estimator, data, tmp_path):
    train, wrong, test = data
    estimator.fit(states_like(train), wrong).save(tmp_path / "saved")
    loaded = type(estimator).load(tmp_path / "saved")
    assert str(loaded) == str(estimator)
    assert np.array_equal(loaded.score(states_like(test)), estimator.score(states_like(test)))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [ARRAYS_FILE, CONFIG_FILE]


@pytest.mark.parametrize(
    ("load_estimator", "kind"),
    [(load_linear_probe, LinearProbe), (load_mahalanobis_distance, MahalanobisDistance)],
)
def test_lm_polygraphs_plug_in_form_builds_or_loads(load_estimator, kind, data, tmp_path):
    train, wrong, test = data
    built = load_estimator({"layer": 2, "tokens": "last_prompt"})
    assert isinstance(built, kind) and built.layer == 2
    built.fit(states_like(train), wrong).save(tmp_path)
    loaded = load_estimator({"path": str(tmp_path)})
    assert np.array_equal(loaded.score(states_like(test)), built.score(states_like(test)))
    with pytest.raises(ValueError, match=r"already fixes \['layer'\]"):
        load_estimator({"path": str(tmp_path), "layer": 3})


def test_scoring_before_fitting_says_what_to_call(estimator, data):
    with pytest.raises(NotFittedError, match=r"not fitted; call fit\(states, wrong\) first"):
        estimator.score(states_like(data[2]))
    with pytest.raises(NotFittedError):
        estimator.save("nowhere")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1] * 60, "all 60 labels are 1; LinearProbe learns from right and wrong"),
        ([0] * 60, "all 60 labels are 0"),
        ([0, 1] * 20, r"wrong has shape \(40,\), and there are 60 sequences"),
        ([0, 2] * 30, r"wrong has the values \[0, 2\]; allowed are 0 \(right\) and 1 \(wrong\)"),
        ([0.0, np.nan] * 30, "allowed are 0"),
        (None, "give wrong=, one label a sequence"),
    ],
)
def test_bad_labels_are_an_error_and_the_earlier_fit_stays(data, labels, message):
    train, wrong, test = data
    probe = LinearProbe(2).fit(states_like(train), wrong)
    before = probe.score(states_like(test))
    with pytest.raises(ValueError, match=message):
        probe.fit(states_like(train), labels)
    assert np.array_equal(probe.score(states_like(test)), before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_states_are_an_error_naming_the_sequence(estimator, data, bad):
    train, wrong, test = data
    broken = train.copy()
    broken[17, 3] = bad
    with pytest.raises(
        ValueError, match=r"1 of 60 sequences have NaN or infinite values \(sequences \[17\], layer 2\)"
    ):
        estimator.fit(states_like(broken), wrong)
    estimator.fit(states_like(train), wrong)
    broken_test = test.copy()
    broken_test[4, 0] = bad
    with pytest.raises(ValueError, match=r"sequences \[4\]"):
        estimator.score(states_like(broken_test))


def test_states_that_overflow_float32_only_in_the_distance_are_an_error_or_finite(estimator, data):
    train, wrong, test = data
    scores = estimator.fit(states_like(train), wrong).score(states_like(test * np.float32(1e30)))
    assert np.isfinite(scores).all()


def test_no_states_are_an_error(estimator):
    with pytest.raises(ValueError, match="give at least one sequence"):
        estimator.fit([], [])


@pytest.mark.parametrize("rows", [1, 5])
def test_a_distance_needs_two_different_training_rows(rows):
    with pytest.raises(ValueError, match=f"at least two different training rows, got {rows}"):
        MahalanobisDistance(2).fit(states_like(np.ones((rows, 8), dtype=np.float32)))


def test_several_vectors_a_sequence_are_refused():
    with pytest.raises(ValueError, match="choose 'mean' or 'last'"):
        LinearProbe(2, tokens="generated", pooling="none")


@pytest.fixture
def saved(data, tmp_path):
    train, _, _ = data
    MahalanobisDistance(2).fit(states_like(train)).save(tmp_path)
    return tmp_path


def test_states_of_another_hidden_size_or_depth_are_refused(saved, data):
    loaded = MahalanobisDistance.load(saved)
    with pytest.raises(ValueError, match="hidden size 8 and 4 layers; these states have hidden size 9 and 4 layers"):
        loaded.score(states_like(np.ones((1, 9), dtype=np.float32)))
    with pytest.raises(ValueError, match="these states have hidden size 8 and 6 layers"):
        loaded.score(states_like(data[2], num_hidden_layers=6))


def test_an_estimator_of_another_class_is_refused(saved):
    with pytest.raises(ValueError, match="holds a MahalanobisDistance, not a LinearProbe"):
        LinearProbe.load(saved)


def test_a_changed_layer_set_is_refused(saved):
    config = json.loads((saved / CONFIG_FILE).read_text())
    config["parameters"]["layer"] = 3
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"fitted on layers \[2\], and its parameters name layer 3"):
        MahalanobisDistance.load(saved)


@pytest.mark.parametrize("name", [ARRAYS_FILE, CONFIG_FILE])
def test_a_truncated_file_is_refused(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=name):
        MahalanobisDistance.load(saved)


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"PK\x03\x04 something else"])
@pytest.mark.parametrize("name", [ARRAYS_FILE, CONFIG_FILE])
def test_a_foreign_file_is_refused(saved, name, content):
    (saved / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        MahalanobisDistance.load(saved)


def test_a_folder_without_an_estimator_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder written by save"):
        LinearProbe.load(tmp_path)
