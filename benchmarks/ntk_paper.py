"""What the paper of DP-NTK regression states: its number of samples, and its regression on them.

Differential Privacy Mechanisms in Neural Tangent Kernel Regression, Algorithms 1 and 2, section 5.
`fedsim.learners.ntk` has the kernel. Used by `ntk.py` here, and by the tests of the paper's errors.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.learners import ntk
from fedsim.privacy.mechanisms import kernel_distance
from fedsim.privacy.numerics.special import Array
from fedsim.rng import normal
from fedsim.types import FedsimError

_SINGULAR = 1e-12
"""A matrix is singular if its smallest eigenvalue is below this share of its largest. Rounding
leaves about 1e-16 n where the exact value is zero, on any processor."""


def gaussian_samples(root: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(n, count) independent draws of N(0, K), K = root root': Algorithm 1 before its average.

    Raises:
        FedsimError: `count` is not positive.
    """
    if count < 1:
        raise FedsimError(f"gaussian sampling needs at least one sample, not {count}")
    return root @ normal((root.shape[1], count), generator, root.dtype)


def fit_sampled(samples: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Returns α̃ = (K̃ + λ I)⁻¹ Y for K̃ = G G' / k, by Woodbury's identity where k < n.

    `samples` G are (n, k), as `gaussian_samples` draws them.

    Raises:
        FedsimError: `ridge` is not positive, or lost in the rounding of a singular K̃.
    """
    n, k = samples.shape
    if k >= n:
        return ntk.fit(samples @ samples.T / k, labels, ridge)
    return (labels - samples @ ntk.fit(samples.T @ samples, samples.T @ labels, k * ridge)) / ridge


def fit_without_kernel(labels: Tensor, ridge: float) -> Tensor:
    """Returns α = Y / λ: the control that drops the kernel matrix and its leakage."""
    return labels / ridge


def neighbour_distance(gram: Tensor, other: Tensor) -> float:
    """Returns M = |K^½ K'⁻¹ K^½ - I|_F (Definition 5.1) of two positive definite matrices.

    Raises:
        FedsimError: `other` is singular: its least eigenvalue is below 1e-12 times its largest,
            where rounding alone may have made it.
    """
    eigenvalues = torch.linalg.eigvalsh(other)
    if float(eigenvalues[0]) < _SINGULAR * float(eigenvalues[-1]):
        raise FedsimError(
            "the neighbour's kernel matrix is singular: no distance is finite, and no number of "
            "samples is private"
        )
    lower = torch.linalg.cholesky(other)
    # K^½ K'⁻¹ K^½ has the eigenvalues of L⁻¹ K L⁻' (L L' = K').
    half = torch.linalg.solve_triangular(lower, gram, upper=False)
    inner = torch.linalg.solve_triangular(lower, half.T, upper=False)
    return float(torch.linalg.matrix_norm(inner - torch.eye(len(gram), dtype=gram.dtype)))


def distance(
    n: int, beta: float, smallest: float, *, scale: float = 1.0, bound: float = 1.0
) -> float:
    """Returns the bound of M in equation (1): n σ² B⁴ β / η_min, every O(·) read as 1.

    `smallest` is η_min, the smallest eigenvalue of K, and `bound` B the largest norm of a row.
    Lemmas E.4 and E.15, from which it follows, have B³. As printed it is no bound, since constants
    are left out. `fedsim.privacy.mechanisms.kernel_distance` has one that holds and does not grow
    with n.
    """
    return n * scale**2 * bound**4 * beta / smallest


def radius(epsilon: float, delta: float, samples: int) -> float:
    """Returns the allowed M, min{ε / sqrt(8 k ln(1/δ)), ε / (8 ln(1/δ))} (Definition 5.2)."""
    information = 8 * math.log(1 / delta)
    return min(epsilon / math.sqrt(samples * information), epsilon / information)


def samples(epsilon: float, delta: float, distance: float) -> int:
    """Returns the largest k with `distance` <= ε / sqrt(8 k ln(1/δ)): equation (1) of the paper.

    The lemma that it rests on needs more: see `condition`.
    """
    return math.floor(epsilon**2 / (8 * math.log(1 / delta) * distance**2))


def condition(epsilon: float, delta: float, samples: int, distance: float) -> bool:
    """Whether Lemma 5.4 applies: ε in (0, 1), Δ < 1 and M <= Δ (Condition 5.3).

    Args:
        epsilon: ε.
        delta: δ.
        samples: k.
        distance: M.
    """
    allowed = radius(epsilon, delta, samples)
    return 0 < epsilon < 1 and allowed < 1 and distance <= allowed


def assumed(beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """The largest M if the neighbour's kernel matrix has no eigenvalue below `least`."""
    a = kernel_distance.feature_shift(beta, gain=gain, row_norm=row_norm) / math.sqrt(least)
    return 2 * a + a * a


def of_data(beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0) -> float:
    """The bound of M between these data, of least eigenvalue `least`, and any neighbour.

    Infinite where the neighbour's matrix may be singular. It is computed from the data, and so
    reveals something of them.
    """
    back = assumed(beta, least, gain=gain, row_norm=row_norm)
    return back / (1 - back) if back < 1 else math.inf


def of_data_eigenvalues(
    beta: float, least: float, *, gain: float = 1.0, row_norm: float = 1.0
) -> Array:
    """(n, 2) bounds of (λ+, λ-) between these data, of least eigenvalue `least`, and any neighbour.

    In both orders. Where the neighbour's matrix may be singular some λ- is at least 1. They are
    computed from the data, and so reveal something of them.
    """
    forth = kernel_distance.eigenvalues_above_floor(beta, least, gain=gain, row_norm=row_norm)
    up, down = forth.T
    with np.errstate(divide="ignore"):
        back = np.stack([np.where(down < 1, down / (1 - down), np.inf), up / (1 + up)], axis=-1)
    return np.concatenate([forth, back])


def deviation_bound(
    gram: Tensor, cross: Tensor, labels: Tensor, ridge: float, samples: int, failure: float = 0.05
) -> Tensor:
    """Returns (a, c) bounds of |f_K - f_K̃| that hold together with probability 1 - `failure`.

    In place of Theorem 4.4's, whose ρ < 1 asks for over n² draws; this one holds at any n and k. It
    is computed from the data, and so no part of a release. With A² = K (K + λ)⁻¹ and k = `samples`
    draws of covariance W, f_K - f_K̃ is u'(I - H⁻¹)v for u = (K + λ)^-½ K(X, x), v = (K + λ)^-½ Y
    and H = I - A² + AWA, so that it is at most |u| |v| max(1 / c - 1, 1 - 1 / C) for H's extreme
    eigenvalues c and C. With a the largest entry of A and D = tr A² the effective dimension:

    H's quadratic form is max_v 1 - |Au|² + v'G'Au - k |v|² / 4, G being n x k and normal. Gordon's
    and Slepian's comparisons put |Au| g'v + |v| h'Au in place of v'G'Au, with normal g and h
    (Thrampoulidis, Oymak and Hassibi, COLT 2015, Theorem 3). With |Au| = w <= a that is
    1 - w² + (w |g| ± |Ah|)₊² / k. But for 8 exp(-s²/2), |g| is between k / sqrt(k + 1) - s and
    sqrt(k) + s, and |Ah| at most r = sqrt(D) + a s, so that c and C are its extremes over w.

    `gram` K is (n, n), `cross` K(x, X) (a, n), `labels` Y (n, c), `ridge` λ > 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    shrunk = values.clamp(min=0) / (values.clamp(min=0) + ridge)
    top, effective = math.sqrt(float(shrunk.max())), math.sqrt(float(shrunk.sum()))
    s = math.sqrt(2 * math.log(8 / failure))
    g, r = samples / math.sqrt(samples + 1) - s, effective + top * s
    # The upper one rises with w. In the lower one the square is 0 below w = r / g, and beyond it
    # the sum is concave: the ends are least.
    most = 1 - top**2 + (top * (math.sqrt(samples) + s) + r) ** 2 / samples
    least = 1 - top**2
    if g > 0 and r / g < top:
        least = min(1 - (r / g) ** 2, least + (top * g - r) ** 2 / samples)
    inverse = 1 / (values.clamp(min=0) + ridge).sqrt()
    u = ((cross @ vectors) * inverse).norm(dim=1)
    v = ((vectors.T @ labels) * inverse[:, None]).norm(dim=0)
    return torch.outer(u, v) * max(1 / least - 1, 1 - 1 / most)
