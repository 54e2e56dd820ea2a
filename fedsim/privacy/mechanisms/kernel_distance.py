"""Bounds how far apart neighbours' kernel matrices are, for Gaussian sampling of them.

The distance is M = |K^½ K'⁻¹ K^½ - I|_F (Definition 5.1 of Differential Privacy Mechanisms in
Neural Tangent Kernel Regression). The paper bounds it by |K - K'|_F over the least eigenvalue, and
gets a bound that grows with the number n of rows. The one here does not know n, and is attained.

K = FF' for the quadratic tangent kernel (x'z)(x'Sz), the rows of F being φ(x) = x ⊗ S^½ x. Let one
row move by β, both ends of norm at most B. Then φ moves by at most r = 2 sqrt(s) B β, s being the
largest eigenvalue of S, for its slope along v is v ⊗ S^½ x + x ⊗ S^½ v. F be the neighbour's and N
its matrix, FF' or FF' + γ I; d is the difference of φ and e the row's unit vector. The other
matrix is N - (Fd)e' - e(Fd)' + |d|² ee', and with u = N^-½ F d and w = N^-½ e
M = |-uw' - wu' + |d|² ww'|_F. The square of the first two terms is 2 |u|² |w|² + 2 (u'w)², the last
is |d|² |w|², and |u| <= |d| <= r in either case, since F'N⁻¹F has no eigenvalue above 1.

K^½ K'⁻¹ K^½ - I has rank two, with one eigenvalue λ+ >= 0 and one -λ- <= 0: with τ = |d|² |w|²
their sum is T = τ - 2 u'w and their product -D, D = |u|² |w|² - (u'w)². The farther from zero they
are, the better draws are told apart: noise of N(0, c) added to a draw of N(0, 1) or N(0, 1 ± λ)
makes λ smaller.

*No eigenvalue of N = FF' is below η.* |w|² <= 1/η, so that with a = r / sqrt(η): M <= 2a + a². For
each T it is enough to look at the largest D, which is a² - (u'w)², |u'w| <= a.

*N = FF' + γ I.* Let S = N^-½ F and C = sqrt(γ) N^-½, so that SS' + CC' = I. For any unit vector z,
x = z'Sd / r and y = z'Ce have x² + y² <= 1, and z'(-uw' - wu' + |d|² ww')z is -2axy + a²y² where
|d| = r, with a = r / sqrt(γ): on that disc between exp(-s) - 1 and exp(s) - 1, s = 2 arsinh(a / 2).
So whatever F is, all eigenvalues of K^½ K'⁻¹ K^½ are in [exp(-s), exp(s)], and all but two are 1.
Both ends are attained together, in the limit of another row so long that it fixes d.
"""

from __future__ import annotations

import math

import numpy as np

from fedsim.privacy.numerics.special import Array, require_positive

_PIECES = 128
"""Number of pieces of each part of the curve of assumed eigenvalues."""


def feature_shift(beta: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """Computes r = 2 sqrt(s) B β, the largest L2 distance that a row's features φ(x) move.

    They are those of the kernel (x'z)(x'Sz). `beta` is β > 0, the largest L2 distance that the row
    moves (above 2 B it counts as 2 B). `gain` is s > 0, the largest eigenvalue of S. `row_norm` is
    B > 0, the bound on a row's L2 norm. Other values are a FedsimError.
    """
    for name, value in (("beta", beta), ("gain", gain), ("row_norm", row_norm)):
        require_positive(name, value)
    # Two rows within the bound are never farther apart than twice it.
    return 2 * math.sqrt(gain) * row_norm * min(beta, 2 * row_norm)


def lift_distance(beta: float, lift: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """Computes M, the largest |K^½ K'⁻¹ K^½ - I|_F of neighbours' K and K', whatever the rows are.

    K is the kernel matrix of (x'z)(x'Sz) plus γ I; one row moves. It fails as `feature_shift`.

    Args:
        beta: β > 0, the largest L2 distance that a row moves.
        lift: γ > 0.
        gain: s > 0, the largest eigenvalue of S in the kernel (x'z)(x'Sz).
        row_norm: B > 0, the bound on a row's L2 norm.

    >>> round(lift_distance(0.01, 4.0), 6)
    0.014142
    """
    ((up, down),) = eigenvalues_under_lift(beta, lift, gain=gain, row_norm=row_norm)
    return math.hypot(up, down)


def eigenvalues_under_lift(
    beta: float, lift: float, *, gain: float = 1.0, row_norm: float = 1.0
) -> Array:
    """Computes (1, 2) [[λ+, λ-]], how far K^½ K'⁻¹ K^½ has eigenvalues above and below 1.

    K and errors are as of `lift_distance`. λ+ = exp(s) - 1 and λ- = 1 - exp(-s), where s is
    2 arsinh(a / 2) and a the `feature_shift` over sqrt(γ).

    Args:
        beta: β > 0, the largest L2 distance that a row moves.
        lift: γ > 0.
        gain: s > 0, the largest eigenvalue of S in the kernel (x'z)(x'Sz).
        row_norm: B > 0, the bound on a row's L2 norm.

    >>> eigenvalues_under_lift(0.1, 4.0).round(5)  # a = 0.1
    array([[0.10512, 0.09512]])
    """
    a = feature_shift(beta, gain=gain, row_norm=row_norm) / math.sqrt(
        require_positive("lift", lift)
    )
    s = 2 * math.asinh(a / 2)
    # expm1 keeps the digits of a small move, which exp(s) - 1 would lose.
    return np.array([[math.expm1(s), -math.expm1(-s)]])


def eigenvalues_above_floor(
    beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0
) -> Array:
    """Computes (n, 2) bounds of (λ+, λ-) if the neighbour's matrix has no eigenvalue below `least`.

    They are as of `eigenvalues_under_lift`, without γ; those of any two neighbours are within the
    bounds of one of the n rows. It fails as `feature_shift`.

    Args:
        beta: β > 0, the largest L2 distance that a row moves.
        least: η > 0, assumed of the kernel matrix.
        gain: s > 0, the largest eigenvalue of S in the kernel (x'z)(x'Sz).
        row_norm: B > 0, the bound on a row's L2 norm.
    """
    a = feature_shift(beta, gain=gain, row_norm=row_norm) / math.sqrt(
        require_positive("least", least)
    )
    # The rows bound pieces of a curve on which for each T the product D is the largest: it is
    # a² - q² with q = u'w = a sin(t), and τ = 0 or a². Even steps of t are dense where D falls.
    q: Array = a * np.sin(np.linspace(0, math.pi / 2, _PIECES + 1))
    low, high = q[:-1], q[1:]
    product = a**2 - low**2
    straight: Array = np.linspace(0, a**2, _PIECES // 8 + 1)
    return np.concatenate(
        [
            _corners(-2 * high, -2 * low, product),
            _corners(straight[:-1], straight[1:], np.full(_PIECES // 8, a**2)),
            _corners(2 * low + a**2, 2 * high + a**2, product),
        ]
    )


def _corners(least: Array, most: Array, product: Array) -> Array:
    """Returns (n, 2) the largest λ+ and λ- for T between `least` and `most` and D = `product`."""
    return np.stack(
        [
            # λ+ and -λ- solve λ² - T λ - D = 0: λ+ rises with T and
            # λ- falls with it, and both rise with D.
            most / 2 + np.sqrt(most**2 / 4 + product),
            -least / 2 + np.sqrt(least**2 / 4 + product),
        ],
        axis=-1,
    )
