"""Computes neural tangent kernel regression with quadratic activation, and its private release.

Differential Privacy Mechanisms in Neural Tangent Kernel Regression, section 3.3 (kernels), 3.4
(regression), Algorithm 1 (Gaussian sampling mechanism) and Algorithm 2 (private regression). The
network f(x) = Σ_r a_r (w_r'x)² has the kernel K(x, z) = (x'z) (x'Sz) with S = W'W / m, which tends
to σ² (x'z)² as m grows.

What is released of a training set (X, Y) is X̃, X behind truncated Laplace noise, and
α̃ = (K̃ + λ I)⁻¹ Y, K̃ being a Wishart draw of mean K. Labels are not protected, and neighbours are
sets of which one x is moved by at most β: a record is hidden only among records that close.
Prediction lacks Definition 3.8's factor 1 / n, as Algorithm 2 does; no class depends on it.

Arrays are float64 on the CPU. `X` is (n, d), `Y` (n, c) with one column a class, and `weights` are
(m, d), or None for the continuous kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.types import FedsimError

_SINGULAR = 1e-12
"""A matrix is singular if its smallest eigenvalue is below this share of its largest. Rounding
leaves about 1e-16 n where the exact value is zero, on any processor."""


def draw_weights(neurons: int, dimension: int, scale: float, generator: torch.Generator) -> Tensor:
    """Draws (neurons, dimension) weights w_r ~ N(0, scale² I): public, without the data.

    Args:
        neurons: m.
        dimension: d.
        scale: σ.
        generator: stream that draws them.
    """
    return scale * torch.randn(neurons, dimension, generator=generator, dtype=torch.float64)


def kernel(x: Tensor, z: Tensor, weights: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Returns (a, b) kernel values of x (a, d) and z (b, d).

    Args:
        x: (a, d).
        z: (b, d).
        weights: of the discrete kernel (Definition 3.5), which carry σ themselves; None for the
            continuous kernel σ² (x'z)² (Definition 3.6).
        scale: σ of the continuous kernel.
    """
    product = x @ z.T
    if weights is None:
        return scale**2 * product**2
    return product * ((x @ weights.T) @ (z @ weights.T).T) / len(weights)


def fit(gram: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Returns α = (K + λ I)⁻¹ Y, (n, c), of `gram` K (n, n) and `ridge` λ > 0.

    Raises:
        FedsimError: `ridge` is not positive, or lost in the rounding of a singular K.
    """
    _require_ridge(ridge)
    shifted = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    return torch.cholesky_solve(labels, _factor(shifted, ridge))


def fit_sampled(samples: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Returns α̃ = (K̃ + λ I)⁻¹ Y for K̃ = G G' / k, by Woodbury's identity where k < n.

    `samples` G are (n, k), as `gaussian_samples` draws them.

    Raises:
        FedsimError: `ridge` is not positive, or lost in the rounding of a singular K̃.
    """
    _require_ridge(ridge)
    n, k = samples.shape
    if k >= n:
        return fit(samples @ samples.T / k, labels, ridge)
    small = samples.T @ samples + k * ridge * torch.eye(k, dtype=samples.dtype)
    inner = torch.cholesky_solve(samples.T @ labels, _factor(small, ridge))
    return (labels - samples @ inner) / ridge


def fit_without_kernel(labels: Tensor, ridge: float) -> Tensor:
    """Returns α = Y / λ: the control that drops the kernel matrix and its leakage."""
    _require_ridge(ridge)
    return labels / ridge


def predict(
    x: Tensor, train: Tensor, alpha: Tensor, weights: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """Returns (a, c) values K(x, X) α, of which the largest is the class.

    Args:
        x: (a, d) features to predict.
        train: X (n, d).
        alpha: α (n, c).
        weights: see `kernel`.
        scale: see `kernel`.
    """
    return kernel(x, train, weights, scale=scale) @ alpha


def quadratic_form(
    train: Tensor, alpha: Tensor, weights: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """Returns (c, d, d) symmetric Q with x' Q_j x = K(x, X) α_j for all x: the predictor.

    Q_j = sym(X' diag(α_j) X S). It is linear in the predictor, so that the mean of several models'
    predictions is the prediction of their mean Q.

    Args:
        train: X (n, d).
        alpha: α (n, c).
        weights: see `kernel`.
        scale: see `kernel`.
    """
    weighted = torch.einsum("ij,ia,ib->jab", alpha, train, train)
    if weights is None:
        form = scale**2 * weighted
    else:
        form = weighted @ (weights.T @ weights / len(weights))
    return (form + form.transpose(1, 2)) / 2


def evaluate_form(x: Tensor, form: Tensor) -> Tensor:
    """Returns (a, c) values x' Q_j x of x (a, d) and `form` Q (c, d, d)."""
    return torch.stack([((x @ one) * x).sum(1) for one in form], dim=1)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Returns (n, classes) of zeros and ones."""
    return torch.nn.functional.one_hot(labels, classes).double()


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


def paper_distance(
    n: int, beta: float, smallest: float, *, scale: float = 1.0, bound: float = 1.0
) -> float:
    """Returns the bound of M in equation (1): n σ² B⁴ β / η_min, every O(·) read as 1.

    `smallest` is η_min, the smallest eigenvalue of K, and `bound` B the largest norm of a row.
    Lemmas E.4 and E.15, from which it follows, have B³. As printed it is no bound, since constants
    are left out. `fedsim.privacy.mechanisms.kernel_distance` has one that holds and does not grow
    with n.
    """
    return n * scale**2 * bound**4 * beta / smallest


def paper_radius(epsilon: float, delta: float, samples: int) -> float:
    """Returns the allowed M, min{ε / sqrt(8 k ln(1/δ)), ε / (8 ln(1/δ))} (Definition 5.2)."""
    information = 8 * math.log(1 / delta)
    return min(epsilon / math.sqrt(samples * information), epsilon / information)


def paper_samples(epsilon: float, delta: float, distance: float) -> int:
    """Returns the largest k with `distance` <= ε / sqrt(8 k ln(1/δ)): equation (1) of the paper.

    The lemma that it rests on needs more: see `paper_condition`.
    """
    return math.floor(epsilon**2 / (8 * math.log(1 / delta) * distance**2))


def paper_condition(epsilon: float, delta: float, samples: int, distance: float) -> bool:
    """Whether Lemma 5.4 applies: ε in (0, 1), Δ < 1 and M <= Δ (Condition 5.3).

    Args:
        epsilon: ε.
        delta: δ.
        samples: k.
        distance: M.
    """
    radius = paper_radius(epsilon, delta, samples)
    return 0 < epsilon < 1 and radius < 1 and distance <= radius


def _factor(matrix: Tensor, ridge: float) -> Tensor:
    """Returns L of `matrix` = L L', unless `ridge` does not make it positive definite."""
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(matrix)
    pivots = lower.diagonal().square()
    if int(info) or float(pivots.min()) < _SINGULAR * float(matrix.diagonal().max()):
        raise FedsimError(
            f"ridge {ridge}: K + λ I is singular up to rounding; raise the ridge, to 1e-10 times "
            "the kernel's largest value at least"
        )
    return lower


def _require_ridge(ridge: float) -> None:
    if not ridge > 0:
        raise FedsimError(f"ridge {ridge}: λ has to be positive, or K + λ I may be singular")
