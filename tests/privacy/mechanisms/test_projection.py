"""δ of random projection over its whole domain, against mpmath by two methods; laws; inverses."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ndis_reference import projection_difference

from fedsim.privacy.mechanisms import projection
from fedsim.privacy.numerics import quadratic

DOMAIN = {
    "p": st.one_of(
        st.floats(-10, -0.05).map(lambda x: 10**x),
        st.floats(-10, -1).map(lambda x: 1 - 10**x),
        st.floats(0.01, 0.99),
    ),
    "r": st.one_of(st.integers(1, 8), st.floats(1, 4).map(lambda x: round(10**x))),
    "share": st.floats(0, 1),
    "near": st.booleans(),
}


def check(p: float, r: int, epsilon: float, reverse: bool) -> None:
    way = "reverse" if reverse else "forward"
    found = float(projection.log_delta(p, r, epsilon, way))
    exact = projection_difference(p, r, epsilon, reverse)
    if exact == 0:
        assert found == -math.inf
        return
    expected = mp.log(exact)
    assert not math.isnan(found)
    if expected > -690:
        assert abs(mp.expm1(found - expected)) < 1e-10
    else:
        assert abs(found / expected - 1) < 1e-8


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**DOMAIN)
def test_the_removal_agrees_with_high_precision(p: float, r: int, share: float, near: bool) -> None:
    # near: where δ is neither 1 nor tiny
    epsilon = min(10.0, 30 * share * p * math.sqrt(r)) if near else 10 * share
    check(p, r, epsilon, reverse=False)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(**DOMAIN)
def test_the_reverse_agrees_with_high_precision(p: float, r: int, share: float, near: bool) -> None:
    most = -r / 2 * math.log1p(-p)  # beyond that the reverse δ is 0
    check(p, r, min(10.0, most * share * 0.999) if near else 10 * share, reverse=True)


def test_the_contour_integral_agrees() -> None:
    """A third method, over a grid that the others are too slow for."""
    p, r, epsilon = np.meshgrid(
        10.0 ** -np.arange(0.02, 10, 0.9), [1, 2, 31, 9999], [0.0, 1e-4, 0.1, 3.0, 10.0]
    )
    for way, a in (("forward", -p / (1 - p)), ("reverse", p)):
        rest = 1 / (1 - p) if way == "forward" else 1 - p
        forms = (x[..., None] for x in (a, rest, np.zeros_like(a), np.asarray(r, dtype=float)))
        other = quadratic.log_delta(*forms, epsilon)
        found = projection.log_delta(p, r, epsilon, way)  # type: ignore[arg-type]
        finite = np.isfinite(found)
        assert (finite == np.isfinite(other)).all()
        assert np.allclose(found[finite], other[finite], rtol=1e-11, atol=1e-10)


def test_forward_is_the_larger_direction_and_both_of_them() -> None:
    p, r, epsilon = np.meshgrid(10.0 ** -np.arange(0.01, 9, 0.7), [1, 5, 300], [0.0, 0.01, 1, 8])
    forward, reverse, both = (
        projection.log_delta(p, r, epsilon, way) for way in ("forward", "reverse", "both")
    )
    assert (forward >= reverse - 1e-12).all()
    assert (both == forward).all()


def test_at_the_ends_of_the_range() -> None:
    assert np.exp(projection.log_delta(1.0, 5, 10.0)) == 1.0
    assert np.exp(projection.log_delta(1.0, 5, 10.0, "reverse")) == 1.0
    assert np.exp(projection.log_delta(0.0, 5, 0.0)) == 0.0
    powers = 10.0 ** -np.arange(1, 17)
    everywhere = projection.log_delta(
        np.concatenate([[5e-324, 1e-300], powers, 1 - powers]),
        np.array([[1.0], [1e4], [1e8]]),
        np.array([0.0, 1e-300, 1.0, 10.0, 700.0, 1e6])[:, None, None],
    )
    assert not np.isnan(everywhere).any()
    assert (everywhere <= 0).all()


def test_the_inverses_return_to_where_they_came_from() -> None:
    log_delta = np.array([-0.01, -1.0, -12.0, -300.0, -650.0])
    r = np.array([1.0, 30.0, 10_000.0])[:, None]
    for epsilon in (0.0, 1e-4, 1.0, 10.0):
        leverage = projection.max_leverage(epsilon, np.exp(log_delta), r)
        again = projection.log_delta(leverage, r, epsilon)
        assert np.allclose(again, np.broadcast_to(log_delta, again.shape), rtol=1e-11, atol=1e-10)
        found = projection.epsilon(leverage, r, np.exp(log_delta))
        assert np.allclose(found, epsilon, rtol=1e-9, atol=1e-9)
    assert projection.epsilon(1.0, 5, 1e-5) == math.inf
    assert projection.epsilon(0.0, 5, 1e-5) == 0.0
