"""Whatever asks for an ε: the noise that is found for it states no more."""

from __future__ import annotations

from typing import Any

import pytest
from slow_cases import slow_but

from fedsim.contracts.guarantee import Release, Statistic
from fedsim.contracts.stack import Stack
from fedsim.privacy.ledger import Entry, claim
from fedsim.scenario.build import build_stack
from fedsim.scenario.model import PluginRef
from fedsim.types import LocalTraining

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)


def stack(*members: dict[str, Any]) -> Stack:
    return build_stack(
        [
            PluginRef(name=one["name"], parameters={k: v for k, v in one.items() if k != "name"})
            for one in members
        ]
    )


def features(count: int, *statistics: Statistic) -> Release:
    return Release(
        kind="kernel_regression", row_norm=1.0, columns=0, features=count, statistics=statistics
    )


SKETCH = Release(kind="sketch", row_norm=1.5, columns=40, features=4)
LAPLACE = {"name": "truncated_laplace", "beta": 0.07}
NOTHING = {"name": "gaussian_sampling", "beta": 0.07, "samples": 0, "lift": 1.0}
SAMPLING = {"name": "gaussian_sampling", "beta": 1e-4, "lift": 1.0}
CASES: dict[str, tuple[list[dict[str, Any]], Release | None]] = {
    "gaussian_noise": ([{"name": "clip", "norm": 0.3}, {"name": "gaussian_noise"}], None),
    "tight": ([LAPLACE], features(64, "features")),
    "one feature": ([LAPLACE], features(1, "features")),
    "paper": ([{**LAPLACE, "calibration": "paper"}], features(64, "features")),
    "nothing beside it": ([NOTHING, LAPLACE], features(16, "features", "kernel")),
    "sampling": ([SAMPLING], features(16, "kernel")),
    "projection": ([{"name": "random_projection"}], SKETCH),
    "least squares": (
        [{"name": "least_squares"}],
        Release(kind="normal_coefficients", row_norm=1.5, columns=30, features=2),
    ),
}


@pytest.mark.parametrize("name", slow_but(CASES.keys() - {"least squares"}, CASES.keys()))
@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_no_more_is_stated_than_was_asked_for(name: str, epsilon: float) -> None:
    members, release = CASES[name]
    for delta in (1e-9, 1e-5, 1e-3):
        asked = {"epsilon": epsilon, "delta": delta}
        made = stack(*members[:-1], {**members[-1], **asked})
        found = claim(
            made, DECLARED, Entry(rounds=1, num_examples=50, delta=delta, release=release)
        ).epsilon
        assert 0 < found <= epsilon
