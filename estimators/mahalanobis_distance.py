"""Mahalanobis distance: how far a sequence's state lies from the training states."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from sklearn.covariance import LedoitWolf

from polygraph_hs.estimators.base import HiddenStatesEstimator


class MahalanobisDistance(HiddenStatesEstimator):
    """Distance to the training centroid in the metric of the training covariance.

    Lee et al. 2018, A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks,
    equation 2, with one class. With centroid m and covariance S of the training features:

        score(h) = sqrt((h - m)^T S^-1 (h - m))

    S is shrunk towards a multiple of the identity by Ledoit and Wolf 2004 (A well-conditioned estimator for
    large-dimensional covariance matrices), so that it has an inverse when there are fewer rows than dimensions.

    Learned attributes:
        location_: float64 ``(d,)``, the centroid.
        precision_: float64 ``(d, d)``, the inverse of the shrunk covariance.
    """

    ARRAYS: ClassVar = ("location_", "precision_")

    def _fit(self, features: np.ndarray, wrong: None) -> None:
        features = features.astype(np.float64)
        if len(features) < 2 or not (np.ptp(features, axis=0) > 0).any():
            raise ValueError(
                f"a covariance needs at least two different training rows, got {len(features)} "
                f"({'all equal' if len(features) > 1 else 'one'}); give more training sequences"
            )
        covariance = LedoitWolf().fit(features)
        self.location_ = covariance.location_
        self.precision_ = covariance.precision_

    def _score(self, features: np.ndarray) -> np.ndarray:
        difference = features.astype(np.float64) - self.location_
        squared = np.einsum("nd,nd->n", difference @ self.precision_, difference)
        # Rounding may leave a distance of zero slightly negative.
        return np.sqrt(np.maximum(squared, 0))


def load_estimator(config) -> MahalanobisDistance:
    """lm-polygraph's plug-in entry: parameters of :class:`MahalanobisDistance`, or ``path`` of a saved one."""
    return MahalanobisDistance.from_config(config)
