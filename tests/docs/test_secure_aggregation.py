"""The table of docs/secure-aggregation.md: the noise that is left if more collude or drop out."""

from __future__ import annotations

import math
import re
from pathlib import Path

from fedsim.contracts.guarantee import Guarantee
from fedsim_defenses.secure_aggregation import SecureAggregation

PAGE = Path(__file__).parents[2] / "docs" / "secure-aggregation.md"


def test_what_is_left_of_the_noise() -> None:
    defense = SecureAggregation(noise_multiplier=1.0, threshold=0.8, colluding=0.2)
    terms = defense.terms(Guarantee(sensitivity=1.0), 1)
    rows = re.findall(
        r"^\| (10|8) \| (\d\.\d\d \|.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [int(count) for count, _ in rows] == [10, 8]
    for count, cells in rows:
        told = [float(cell) for cell in cells.split(" | ")]
        kept = [terms.client_noise(10) * math.sqrt(int(count) - bad) for bad in range(5)]
        assert told == [round(value, 2) for value in kept]
