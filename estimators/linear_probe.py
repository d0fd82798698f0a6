"""Linear probe: how probable a linear classifier holds it that the answer is wrong."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from polygraph_hs.estimators.base import HiddenStatesEstimator


class LinearProbe(HiddenStatesEstimator):
    """Logistic regression on standardised hidden states.

    Alain and Bengio 2016, Understanding intermediate layers using linear classifier probes. With features h,
    the training mean m and standard deviation s, and the label "the answer is wrong":

        score(h) = sigmoid(w . (h - m) / s + b)

    where w and b minimise the log loss plus ``|w|^2 / (2 C)``.

    Args:
        layer, tokens, pooling: the features, see :class:`HiddenStatesEstimator`.
        C: inverse strength of the L2 regularisation, as in scikit-learn. States have more dimensions than there
            usually are labelled answers, so the default regularises strongly.

    Learned attributes:
        coef_: float64 ``(d,)``, w / s, the direction in the space of the states themselves.
        intercept_: float64 ``(1,)``, b - w . m / s.
    """

    ARRAYS: ClassVar = ("coef_", "intercept_")
    PARAMETERS: ClassVar = ("layer", "tokens", "pooling", "C")
    NEEDS_LABELS: ClassVar = True

    def __init__(self, layer=-1, tokens: str = "last_prompt", pooling: str = "last", C: float = 0.01):
        super().__init__(layer, tokens, pooling)
        if not C > 0:
            raise ValueError(f"C={C!r} must be greater than 0; smaller regularises more")
        self.C = C

    def _fit(self, features: np.ndarray, wrong: np.ndarray) -> None:
        scaler = StandardScaler()
        regression = LogisticRegression(C=self.C, max_iter=10_000)
        make_pipeline(scaler, regression).fit(features.astype(np.float64), wrong)
        self.coef_ = regression.coef_[0] / scaler.scale_
        self.intercept_ = regression.intercept_ - self.coef_ @ scaler.mean_

    def _score(self, features: np.ndarray) -> np.ndarray:
        return expit(features.astype(np.float64) @ self.coef_ + self.intercept_)


def load_estimator(config) -> LinearProbe:
    """lm-polygraph's plug-in entry: parameters of :class:`LinearProbe`, or ``path`` of a saved one."""
    return LinearProbe.from_config(config)
