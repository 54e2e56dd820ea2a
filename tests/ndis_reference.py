"""High-precision references for the closed forms."""

from __future__ import annotations

from typing import Any

import mpmath as mp


def gaussian_difference(mu: float, epsilon: float) -> Any:
    """Balle and Wang's Theorem 8 as it stands, with digits to spare for its cancellation."""
    with mp.workdps(80):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        with mp.workdps(80 + int(2 * abs(mp.log10(mu)))):
            c = epsilon / mu - mu / 2
            return mp.ncdf(-c) - mp.exp(epsilon) * mp.ncdf(-c - mu)


def projection_difference(p: float, r: float, epsilon: float, reverse: bool = False) -> Any:
    """Theorem 2 as it stands, with digits to spare for its cancellation."""
    for digits in (50, 100, 200, 400):
        with mp.workdps(digits):
            at, a, eps = mp.mpf(p), mp.mpf(r) / 2, mp.mpf(epsilon)
            log = -mp.log1p(-at)
            if reverse:
                y = (a * log - eps) / at
                if y <= 0:
                    return mp.mpf(0)
                first = mp.gammainc(a, 0, y, regularized=True)
                second = mp.exp(eps) * mp.gammainc(a, 0, (1 - at) * y, regularized=True)
            else:
                x = (eps + a * log) / at
                first = mp.gammainc(a, (1 - at) * x, regularized=True)
                second = mp.exp(eps) * mp.gammainc(a, x, regularized=True)
            if first - second > first * mp.mpf(10) ** (25 - digits):
                return first - second
    raise AssertionError("the two tails agree to 375 digits")


def regression_terms(p: float, q: float, r: float, d: int, epsilon: float, reverse: bool) -> Any:
    """(a1, a2, b1, c) of FORMULAS: Theorem 4's exponent a1 Z²/2 + b1 Z + a2 V/2 + c."""
    p, q, r, epsilon = map(mp.mpf, (p, q, r, epsilon))
    s = q - p
    log = d * mp.log(1 - q) - (d + 1) * mp.log(1 - p)
    if reverse:  # (N2, N1)
        a1, a2 = 1 - (1 - q) / (1 - p) ** 2, s / (1 - p)
        b1 = mp.sqrt(r * s * p * (1 - q)) / (1 - p) ** 2
        return a1, a2, b1, epsilon + log / 2 - r * s * p / (2 * (1 - p) ** 2)
    a1, a2 = 1 - (1 - p) ** 2 / (1 - q), -s / (1 - q)
    b1 = mp.sqrt(r * s * p) * (1 - p) / (1 - q)
    return a1, a2, b1, epsilon - log / 2 - r * s * p / (2 * (1 - q))


def two_groups(a1: Any, a2: Any, b1: Any, c: Any, count: int) -> Any:
    """E[(1 - exp(a1 Z²/2 + b1 Z + a2 V/2 + c))+], V chi-square with `count` degrees of freedom.

    Over V by the incomplete gamma function, over Z by quadrature.
    """
    k = mp.mpf(count) / 2

    def inner(z: Any) -> Any:
        start = a1 * z * z / 2 + b1 * z + c
        if not count or a2 == 0:
            return -mp.expm1(start) if start < 0 else mp.mpf(0)
        edge, factor = -start / a2, mp.exp(start) * (1 - a2) ** -k
        if a2 > 0:
            if start >= 0:
                return mp.mpf(0)
            lower = mp.gammainc(k, 0, edge, regularized=True)
            return lower - factor * mp.gammainc(k, 0, (1 - a2) * edge, regularized=True)
        if edge <= 0:
            return 1 - factor
        upper = mp.gammainc(k, edge, regularized=True)
        return upper - factor * mp.gammainc(k, (1 - a2) * edge, regularized=True)

    ends = {mp.mpf(x) for x in range(-14, 15)}
    root = b1 * b1 - 2 * a1 * c
    if a1 != 0 and root >= 0:
        ends |= {(-b1 + sign * mp.sqrt(root)) / a1 for sign in (1, -1)}
    if a1 != 0:  # where V has to be least, by far the likeliest if V's part is small
        ends |= {-b1 / a1 + j * mp.sqrt(abs(a2 / a1)) for j in range(-14, 15)}
    return mp.quad(lambda z: inner(z) * mp.npdf(z), sorted(x for x in ends if abs(x) <= 14))


def rotated(log_moment: Any, epsilon: float, at: Any) -> Any:
    """The same integral up a ray from `at` at 45 degrees, to the side on which it converges."""

    def height(t: Any, turn: Any) -> Any:
        s = at + t * turn
        return (turn * mp.exp(log_moment(s) - s * epsilon) / (s * (1 + s)) / mp.j).real

    turns = [mp.expjpi(mp.mpf(part) / 4) for part in (1, 3)]
    turn = min(turns, key=lambda each: abs(height(mp.mpf(60), each)))
    ends = [0, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    return mp.quad(lambda t: height(t, turn), ends, maxdegree=5) / mp.pi
