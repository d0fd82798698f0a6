"""Uncertainty estimators on hidden states: one method a file.

To add one, copy ``mahalanobis_distance.py``: derive from :class:`HiddenStatesEstimator`, say what is learned in
``_fit`` and how a row is scored in ``_score``, and list the class here.
"""

from polygraph_hs.estimators.base import HiddenStatesEstimator
from polygraph_hs.estimators.linear_probe import LinearProbe
from polygraph_hs.estimators.mahalanobis_distance import MahalanobisDistance

__all__ = ["HiddenStatesEstimator", "LinearProbe", "MahalanobisDistance"]
