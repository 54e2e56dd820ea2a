"""Integrals through a saddle point against those that are known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import gammaln

from fedsim.privacy.numerics.quadratic import Integrand, integral

POWERS = np.array([0.6, 1.0, 1.5, 2.0, 7.3, 40.0, 1e3, 1e6])


def terms(*parts: tuple[Any, Any, Any], slope: Any = 0.0) -> Integrand:
    """Of (reach, power, bulk)."""
    columns = np.broadcast_arrays(slope, *(np.asarray(x) for part in parts for x in part))
    rows = [np.array(x, dtype=float).reshape(-1) for x in columns]
    return Integrand(rows[0], np.stack(rows[1::3]), np.stack(rows[2::3]), np.stack(rows[3::3]))


def test_a_power_is_the_reciprocal_of_the_gamma_function() -> None:
    """Hankel: the integral of e^s s^-a upwards is 2 π i / Γ(a); around s = a, by sqrt(a)."""
    found, mean = integral(terms((1 / np.sqrt(POWERS), POWERS, 0.0)))
    exact = np.log(np.pi) - POWERS + (POWERS - 0.5) * np.log(POWERS) - gammaln(POWERS)
    # what the reference loses, Γ(a) being that large
    lost = 1e-15 * np.maximum(1.0, POWERS * np.log(POWERS))
    assert (np.abs(np.log(found) - exact) < 1e-13 + lost).all()
    # one power of s more has Γ(a - 1)
    assert np.allclose(mean[2:], -1 / np.sqrt(POWERS[2:]), rtol=1e-9)


def test_the_square_alone_is_normal() -> None:
    found, mean = integral(terms((0.0, 0.0, 0.5)))
    assert found == pytest.approx(np.sqrt(np.pi / 2), rel=1e-14)
    assert mean == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("reach", [1e-6, 0.01, 0.2, 0.7, -0.3])
def test_a_fraction_is_a_bessel_function(reach: float) -> None:
    """With b = bulk / reach²: e^(b (u + 1/u - 2)), u = 1 + reach z, has I_1(2 b) up to e^(2 b)."""
    from scipy.special import ive

    # divided by u², that is a power 2 with its linear part taken back
    b = 0.5 / reach**2
    found, _ = integral(terms((reach, 2.0, 0.5), slope=-2.0 * reach))
    if abs(reach) > 0.005:
        assert found == pytest.approx(np.pi * ive(1, 2 * b) / abs(reach), rel=1e-12)
    else:
        assert found == pytest.approx(np.sqrt(np.pi / 2), rel=1e-9)
