"""Computes neural tangent kernel regression with quadratic activation.

Gu et al., Differential Privacy Mechanisms in Neural Tangent Kernel Regression, sections 3.3 and
3.4. The network f(x) = Σ_r a_r (w_r'x)² has the kernel K(x, z) = (x'z) (x'Sz) with S = W'W / m,
which tends to σ² (x'z)² as m grows. Prediction lacks Definition 3.8's factor 1 / n, as Algorithm 2
does; no class depends on it. Arrays are float64 on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.types import FedsimError

_SINGULAR = 1e-12
"""A matrix is singular if its smallest eigenvalue is below this share of its largest. Rounding
leaves about 1e-16 n where the exact value is zero, on any processor."""


def draw_weights(neurons: int, dimension: int, scale: float, generator: torch.Generator) -> Tensor:
    """Draws the weights (m, d) of m neurons, float64 from N(0, σ²), independent of the data.

    Args:
        neurons: m.
        dimension: d, the number of features.
        scale: σ.
        generator: On the CPU.
    """
    return scale * torch.randn(neurons, dimension, generator=generator, dtype=torch.float64)


def kernel(x: Tensor, z: Tensor, weights: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Computes the (a, b) kernel values K(x, z) = (x'z) (x'Sz) of two sets of rows, S = W'W / m.

    Args:
        x: (a, d) rows.
        z: (b, d) rows.
        weights: W (m, d) of the discrete kernel (Definition 3.5), which carry σ themselves; None
            for the continuous kernel σ² (x'z)² (Definition 3.6).
        scale: σ of the continuous kernel; not used with `weights`.
    """
    product = x @ z.T
    if weights is None:
        return scale**2 * product**2
    return product * ((x @ weights.T) @ (z @ weights.T).T) / len(weights)


def fit(gram: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Computes α = (K + λ I)⁻¹ Y, (n, c), of `gram` K (n, n), `labels` Y (n, c) and λ = `ridge`.

    Y has one column a class, see `one_hot`, and n >= 1. Rows x (a, d) then have the values K(x, X)
    α (a, c); the largest of a row is its class. A FedsimError says that `ridge` is not positive, or
    lost in the rounding of a singular K.
    """
    if not ridge > 0:
        raise FedsimError(f"ridge {ridge}: λ has to be positive, or K + λ I may be singular")
    shifted = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    lower, info = torch.linalg.cholesky_ex(shifted)
    # A tiny pivot is rounding: Cholesky need not fail on a singular matrix.
    pivots = lower.diagonal().square()
    if int(info) or float(pivots.min()) < _SINGULAR * float(shifted.diagonal().max()):
        raise FedsimError(
            f"ridge {ridge}: K + λ I is singular up to rounding; raise the ridge, to 1e-10 times "
            "the kernel's largest value at least"
        )
    return torch.cholesky_solve(labels, lower)


def quadratic_form(
    train: Tensor, alpha: Tensor, weights: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """Computes the predictor (c, d, d): symmetric Q with x' Q_j x = K(x, X) α_j for all x.

    Q_j = sym(X' diag(α_j) X S). It is linear in the predictor, so that the mean of several models'
    predictions is the prediction of their mean Q.

    Args:
        train: X (n, d), whose kernel matrix `fit` was given.
        alpha: α (n, c), as `fit` returns it.
        weights: (m, d) of the neurons, as of `kernel`; None for the continuous kernel.
        scale: σ of the continuous kernel; not used with `weights`.
    """
    weighted = torch.einsum("ij,ia,ib->jab", alpha, train, train)
    if weights is None:
        form = scale**2 * weighted
    else:
        form = weighted @ (weights.T @ weights / len(weights))
    # x'Qx depends on the symmetric part of Q alone.
    return (form + form.transpose(1, 2)) / 2


def evaluate_form(x: Tensor, form: Tensor) -> Tensor:
    """Computes the (a, c) values x' Q_j x of `x` (a, d), where `form` is Q (c, d, d)."""
    return torch.stack([((x @ one) * x).sum(1) for one in form], dim=1)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Returns `labels` (n,), each from 0 to classes - 1, as (n, classes) of float64 0 and 1."""
    return torch.nn.functional.one_hot(labels, classes).double()
