"""The composition of whole curves: against closed forms, and never below them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedsim.contracts.guarantee import Composed, CurveMechanism
from fedsim.privacy.composition import curves
from fedsim.privacy.composition.curves import LogDelta
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import Array


def normal(multiplier: float) -> LogDelta:
    return lambda epsilons: gaussian.log_delta(multiplier, epsilons)


def response(epsilon: float, lost: float) -> LogDelta:
    """Randomized response, which tells for sure with probability `lost`."""

    def curve(epsilons: Array) -> Array:
        rest = np.maximum(0.0, -np.expm1(np.minimum(epsilons - epsilon, 0)))
        with np.errstate(divide="ignore"):
            return np.log(lost + (1 - lost) * rest / (1 + math.exp(-epsilon)))

    return curve


@pytest.mark.parametrize(
    ("multipliers", "delta"),
    [((1.0, 1.0), 1e-5), ((3.0, 0.7), 1e-3), ((20.0, 5.0), 1e-6), ((4.0, 4.0, 2.0), 1e-4)],
)
def test_gaussian_mechanisms_compose_to_one(multipliers: tuple[float, ...], delta: float) -> None:
    together = 1 / math.sqrt(sum(m**-2 for m in multipliers))
    expected = float(gaussian.epsilon(together, delta))
    found = curves.epsilon([normal(m) for m in multipliers], delta)
    assert expected <= found <= 1.001 * expected


def composed(parts: list[tuple[float, float]], epsilon: float) -> float:
    """δ(ε) of randomized responses of (ε_i, δ_i) together, exactly: a sum over their outcomes."""
    sums = [(1.0, 0.0)]
    certain = 1 - math.prod(1 - lost for _, lost in parts)
    for own, _ in parts:
        truth = 1 / (1 + math.exp(-own))
        sums = [
            (chance * part, loss + sign * own)
            for chance, loss in sums
            for part, sign in ((truth, 1), (1 - truth, -1))
        ]
    rest = sum(p * -math.expm1(min(epsilon - loss, 0.0)) for p, loss in sums)
    return certain + (1 - certain) * rest


SEVERAL = (
    [(1.0, 0.0)] * 2,
    [(0.25, 0.0)] * 8,
    [(1.0, 1e-6)] * 3,
    [(2.0, 0.0), (0.1, 0.0), (0.7, 0.0)],
    [(2.0, 1e-6), (0.1, 0.0), (0.7, 1e-4)],
)


@pytest.mark.parametrize("parts", SEVERAL)
@pytest.mark.parametrize("beside", [1e-300, 1e-6])
def test_no_more_than_basic_composition_and_no_less_than_the_truth(
    parts: list[tuple[float, float]], beside: float
) -> None:
    """Releases of (ε_i, δ_i) are together (Σ ε_i, Σ δ_i)-private, and so at any larger δ."""
    delta = sum(lost for _, lost in parts) + beside
    found = curves.epsilon([response(*part) for part in parts], delta)
    assert found <= math.fsum(epsilon for epsilon, _ in parts)
    assert composed(parts, found) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 1e-5])
def test_pure_releases_never_count_for_more_than_their_epsilon(count: int, delta: float) -> None:
    one = Response(unit="example", relation="close", accountant="response", beta=1.0)
    assert (count * (1 - 2 * delta)) <= curves.of_mechanisms((one,) * count, delta) <= count


def test_what_is_lost_for_sure_is_lost() -> None:
    """δ never falls below what the mechanisms give away: with less there is no ε."""
    parts = [normal(1.0), response(0.1, 1e-4)]
    assert curves.epsilon(parts, 0.9e-4) == math.inf
    assert curves.epsilon(parts, 1.1e-4) < math.inf
    with_it, without = (
        curves.epsilon([normal(1.0), response(0.1, lost)], 1e-3) for lost in (5e-4, 0.0)
    )
    assert with_it > without


@dataclass(frozen=True, kw_only=True)
class Known(CurveMechanism):
    """A mechanism of which the curve is known: a Gaussian one."""

    multiplier: float

    def log_delta(self, epsilons: Array) -> Array:
        return gaussian.log_delta(self.multiplier, epsilons)


@dataclass(frozen=True, kw_only=True)
class Response(CurveMechanism):
    """Randomized response of ε = 1: pure."""

    def log_delta(self, epsilons: Array) -> Array:
        return response(1.0, 0.0)(epsilons)


def test_releases_count_as_often_as_they_are_made() -> None:
    """Four of a noise multiplier of 2 are one of 1, however they come together."""
    one = Known(unit="example", relation="close", accountant="normal", beta=1.0, multiplier=2.0)
    expected = float(gaussian.epsilon(1.0, 1e-5))
    found = curves.of_mechanisms((one,) * 4, 1e-5)
    assert expected <= found <= 1.001 * expected
    equal = replace(one)
    assert curves.of_mechanisms((one, equal, equal, one), 1e-5) == pytest.approx(found, rel=1e-9)


def test_one_relative_claim_makes_all_relative() -> None:
    close, relative = (
        Known(unit="example", relation=relation, accountant="normal", beta=1.0, multiplier=2.0)
        for relation in ("close", "relative")
    )
    for parts, relation in (((close, close), "close"), ((close, relative), "relative")):
        assert Composed(parts).relation == relation
