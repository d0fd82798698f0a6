"""lm-polygraph stat calculators fed by the one generation pass of a HiddenStatesModel."""

from polygraph_hs.registration import all_stat_calculators, stat_calculators

__all__ = ["all_stat_calculators", "stat_calculators"]
