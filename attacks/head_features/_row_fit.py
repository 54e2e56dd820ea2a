"""Features from the rows of ∂L/∂W that pruning has left, given near features.

∂L/∂w_j = Σ_i s_ij σ'(w_j'x_i + b_j) x_i is linear in the features once the signals s = A'D and the
neurons that each image activates are known, and near features tell both. Each feature dimension is
then a least-squares problem of its own in N unknowns. Rows of neurons near their threshold are left
out, and entries that do not fit (a neuron taken for active that is not) count little: iteratively
reweighted least squares with Cauchy's weights (Holland and Welsch, Communications in Statistics 6,
1977). An entry that pruning removed counts where the prediction exceeds the smallest one kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim_attacks.head_features._head_gradient import HeadGradient

_ENTRIES = 4
"""For each unknown, from which what is left of ∂L/∂W can tell features."""
_ROUNDS = 3
"""Of reweighting."""
_NEAR = 0.1
"""Distance from its threshold, in standard deviations over neurons, within which a neuron is not
used."""
_OUTLIER = 2.0
"""Residual, in units of the mean one, at which an entry counts half."""
_RIDGE = 1e-5


def applies(head: HeadGradient) -> bool:
    """Says whether pruning has left enough of ∂L/∂W."""
    unknowns = head.num_images * head.hidden.shape[1]
    return head.pruned and int((head.grad_hidden != 0).sum()) >= _ENTRIES * unknowns


def unexplained(head: HeadGradient, features: Tensor, errors: Tensor) -> float:
    """Computes the share of kept ∂L/∂W that `features` (N, d) at their norms and D (K, N) miss."""
    kept = head.grad_hidden != 0
    missed = (_signals(head, features, errors)[0] @ features - head.grad_hidden) * kept
    return float(missed.square().sum() / head.grad_hidden.square().sum())


def fit_rows(head: HeadGradient, features: Tensor, errors: Tensor) -> Tensor:
    """Fits the rows of ∂L/∂W by features (N, d), from near ones at their norms and D (K, N)."""
    signals, sure = _signals(head, features, errors)
    n = len(features)
    pairs = (signals[:, :, None] * signals[:, None, :]).flatten(1)
    kept = head.grad_hidden != 0
    bound = float(head.grad_hidden[kept].abs().min()) if head.smallest_removed else torch.inf
    for _ in range(_ROUNDS):
        predicted = signals @ features
        target = torch.where(kept, head.grad_hidden, predicted.clamp(-bound, bound))
        miss = (predicted - target).abs()
        usual = miss[kept].mean() + torch.finfo(miss.dtype).tiny
        weights = (kept | (miss > 0)) * sure[:, None] / (1 + (miss / (_OUTLIER * usual)).square())
        gram = (weights.T @ pairs).view(-1, n, n).double()
        right = ((weights * target).T @ signals).double()
        # What no row tells of a dimension stays as it was.
        ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).mean() + torch.finfo(gram.dtype).tiny
        regular = gram + ridge * torch.eye(n).to(gram)
        right = right + ridge * features.T.double()
        features = torch.linalg.solve(regular, right[..., None])[..., 0].T.to(features.dtype)
    return features


def _signals(head: HeadGradient, features: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Computes each image's coefficient in each row (m, N), and which rows are reliable (m,)."""
    with torch.enable_grad():
        preactivation = (features @ head.hidden.T + head.bias).detach().requires_grad_()
        (active,) = torch.autograd.grad(head.activation(preactivation).sum(), preactivation)
    length = torch.linalg.vector_norm(head.hidden, dim=1)
    size = torch.linalg.vector_norm(features, dim=1, keepdim=True) * length
    distance = preactivation.detach().abs() / size * head.hidden.shape[1] ** 0.5
    return ((errors.T @ head.output) * active).T, (distance > _NEAR).all(0)
