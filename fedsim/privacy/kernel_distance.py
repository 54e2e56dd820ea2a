"""How far apart the kernel matrices of neighbours are, for Gaussian sampling of them.

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

*No eigenvalue of N = FF' is below η.* |w|² <= 1/η, so that with a = r / sqrt(η): M <= 2a + a².

*N = FF' + γ I.* With the leverage h = e'FF'N⁻¹e in [0, 1): |w|² = (1 - h) / γ, and
(u'w)² = (d'F'N⁻¹e)² <= r² h (1 - h) / γ by Jensen's inequality. The first two terms are at most
a sqrt(2 (1 - h²)) and the last a² (1 - h), a = r / sqrt(γ): M <= sqrt(2) a + a², whatever F is.
"""

from __future__ import annotations

import math

from fedsim.types import FedsimError


def displacement(beta: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """r = 2 sqrt(s) B β, how far φ moves at most.

    `beta` is how far the row moves in L2 norm, `gain` s > 0 (σ² for the continuous kernel),
    `row_norm` B > 0, the bound on the L2 norm of a row.

    Raises:
        FedsimError: an argument is not a finite number above 0.
    """
    for name, value in (("beta", beta), ("gain", gain), ("row_norm", row_norm)):
        _positive(name, value)
    return 2 * math.sqrt(gain) * row_norm * min(beta, 2 * row_norm)


def lifted(beta: float, lift: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """The bound of M for K + γ I, γ being `lift`: it holds whatever the rows are.

    >>> round(lifted(0.01, 4.0), 6)
    0.014242

    Raises:
        FedsimError: an argument is not a finite number above 0.
    """
    a = displacement(beta, gain=gain, row_norm=row_norm) / math.sqrt(_positive("lift", lift))
    return math.sqrt(2) * a + a * a


def assumed(beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """The bound of M if the neighbour's kernel matrix has no eigenvalue below `least`.

    Raises:
        FedsimError: an argument is not a finite number above 0.
    """
    a = displacement(beta, gain=gain, row_norm=row_norm) / math.sqrt(_positive("least", least))
    return 2 * a + a * a


def of_data(beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """The bound of M between these data, of least eigenvalue `least`, and any neighbour.

    Infinite where the neighbour's matrix may be singular. It is computed from the data, and so
    reveals something of them.

    Raises:
        FedsimError: an argument is not a finite number above 0.
    """
    back = assumed(beta, least, gain=gain, row_norm=row_norm)
    return back / (1 - back) if back < 1 else math.inf


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise FedsimError(f"{name}: got {value:g}; expected a finite number above 0")
    return value
