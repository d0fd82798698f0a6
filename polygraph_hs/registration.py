"""Make lm-polygraph's own ``estimate_uncertainty()`` find this project's stat calculators.

lm-polygraph has no entry point for that. This is the one place that touches its namespace: the name ``UEManager``
in the module of ``estimate_uncertainty`` becomes a function that adds calculators if the model is one of ours, and
otherwise calls the same class with the same arguments.
"""

from __future__ import annotations

import functools
import sys

from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from lm_polygraph.utils.manager import UEManager
from omegaconf import OmegaConf

# The module, not the function of the same name that the package exports in its place.
MODULE = "lm_polygraph.utils.estimate_uncertainty"


def stat_calculators() -> list[StatCalculatorContainer]:
    """This project's calculators, in the form that ``UEManager(available_stat_calculators=...)`` takes.

    Where several calculators offer a statistic, lm-polygraph takes the last of the list: put these at the end.
    """
    from polygraph_hs.stat_calculators.alternatives import AlternativesCalculator
    from polygraph_hs.stat_calculators.embeddings import EmbeddingsCalculator
    from polygraph_hs.stat_calculators.generation import GenerationCalculator

    containers = []
    for calculator in (GenerationCalculator, AlternativesCalculator, EmbeddingsCalculator):
        stats, dependencies = calculator.meta_info()
        containers.append(
            StatCalculatorContainer(
                name=calculator.__name__,
                obj=calculator,
                builder=calculator.__module__,
                cfg=OmegaConf.create({}),
                stats=stats,
                dependencies=dependencies,
            )
        )
    return containers


def all_stat_calculators() -> list[StatCalculatorContainer]:
    """lm-polygraph's white-box calculators and, taking precedence, this project's."""
    defaults = register_default_stat_calculators("Whitebox", output_attentions=False, output_hidden_states=False)
    return [*defaults, *stat_calculators()]


def register(model_class: type) -> None:
    """Route ``estimate_uncertainty()`` on models of ``model_class`` through :func:`all_stat_calculators`."""
    import lm_polygraph.utils.estimate_uncertainty  # noqa: F401  (puts the module into sys.modules)

    @functools.wraps(UEManager, updated=())
    def manager(data, model, estimators, **kwargs):
        if isinstance(model, model_class):
            kwargs["available_stat_calculators"] = all_stat_calculators()
        return UEManager(data, model, estimators, **kwargs)

    sys.modules[MODULE].UEManager = manager
