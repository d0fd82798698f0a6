"""What else might have stood at each generated token, in lm-polygraph's form: only for estimators that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from lm_polygraph.stat_calculators.stat_calculator import StatCalculator


class AlternativesCalculator(StatCalculator):
    """``greedy_tokens_alternatives``, from the most probable tokens that came with the generation.

    For each of n sequences and each generated token a list of up to ``n_alternatives`` pairs (token id, natural
    log-probability): the generated token first, then the most probable others.
    """

    def __init__(self, n_alternatives: int = 10):
        super().__init__()
        self.n_alternatives = n_alternatives

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        needed = ["greedy_tokens", "greedy_log_likelihoods", "greedy_top_tokens", "greedy_log_probs"]
        return ["greedy_tokens_alternatives"], needed

    def __call__(self, dependencies: dict, texts: list, model, max_new_tokens: int = 100, **kwargs) -> dict:
        columns = (dependencies[name] for name in self.meta_info()[1])
        return {
            "greedy_tokens_alternatives": [self._alternatives(*sequence) for sequence in zip(*columns, strict=True)]
        }

    def _alternatives(
        self, tokens: Sequence[int], log_likelihoods: Sequence[float], top_tokens: np.ndarray, top_values: np.ndarray
    ) -> list[list[tuple[int, float]]]:
        # The generated token moves to the front, the order of the others stays.
        order = np.argsort(top_tokens != np.asarray(tokens)[:, None], axis=1, kind="stable")
        ids, values = (np.take_along_axis(array, order, axis=1) for array in (top_tokens, top_values))
        is_first = ids[:, 0] == tokens
        alternatives = []
        for token, value, *others, first in zip(
            tokens, log_likelihoods, ids.tolist(), values.tolist(), is_first.tolist(), strict=True
        ):
            pairs = [pair[first : self.n_alternatives - 1 + first] for pair in others]
            alternatives.append([(token, value), *zip(*pairs, strict=True)])
        return alternatives


def load_stat_calculator(config, environment) -> AlternativesCalculator:
    """lm-polygraph's plug-in entry; ``config`` may set ``n_alternatives``."""
    options = {name: config[name] for name in ("n_alternatives",) if name in (config or {})}
    return AlternativesCalculator(**options)
