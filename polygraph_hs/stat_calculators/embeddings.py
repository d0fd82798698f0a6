"""Sequence embeddings in lm-polygraph's definition, from the states that were captured anyway."""

from __future__ import annotations

import numpy as np
from lm_polygraph.stat_calculators.stat_calculator import StatCalculator

from polygraph_hs.spec import CapturePlan

EMBEDDINGS_PLAN = CapturePlan(layers=(-1,), tokens="all")


class EmbeddingsCalculator(StatCalculator):
    """``embeddings_decoder``: float32 ``(n, hidden_size)``, the mean of the last layer over prompt and generation.

    That is what lm-polygraph's own density estimators use. Building the calculator widens the model's capture plan
    to the states it needs, so they come from the same generation pass.
    """

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return ["embeddings", "embeddings_decoder"], ["hidden_states"]

    def __call__(self, dependencies: dict, texts: list, model, max_new_tokens: int = 100, **kwargs) -> dict:
        states = dependencies["hidden_states"]
        plan = EMBEDDINGS_PLAN
        rows = [state.select(plan.layers[0], plan.tokens, "mean").numpy() for state in states]
        return {"embeddings_decoder": np.stack(rows)}


def load_stat_calculator(config, environment) -> EmbeddingsCalculator:
    """lm-polygraph's plug-in entry. Installs what it needs on the environment's model."""
    environment.model.install_plan(EMBEDDINGS_PLAN)
    return EmbeddingsCalculator()
