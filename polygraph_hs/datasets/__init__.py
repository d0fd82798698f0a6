"""Small question sets with known answers."""

from polygraph_hs.datasets.world_facts import is_wrong, load_world_facts

__all__ = ["is_wrong", "load_world_facts"]
