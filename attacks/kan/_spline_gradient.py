"""What the update of a Kolmogorov-Arnold network shows of its batch.

The first layer's hidden units are h_i = d^(-1/2) Σ_jk w_ijk b_k(u_j): b is the B-spline basis (K
functions) and u = tanh of the normalized image (d entries). With ∂L/∂h_i = δ_in for image n,

    √d ∂L/∂w_ijk = Σ_n δ_in b_k(u_nj),                                                       (1)

a matrix (hidden x dK) of rank at most the number of images. What u is does not depend on weights.
So whatever is done to single images' gradients, and however many local steps are taken at whatever
learning rate, (1) goes on to hold, with other δ: clipping by example and FedAvg change nothing
about the images in it. Two identities tell what a combination of rows is:

    Σ_k b_k(u) = 1        and        Σ_k ξ_k b_k(u) = u,

with ξ_k the mean of the knots inside the support of b_k (Marsden, An Identity for Spline Functions
with Applications to Variation-Diminishing Spline Approximation, J. Approx. Theory 3, 1970).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.models.kan import KAN
from fedsim.models.local import mean_gradient_factor
from fedsim.models.splines import basis_size
from fedsim.models.victim import rebuild
from fedsim.types import Observation

_ROUNDING = 1e-9
"""Least noise that is assumed, in units of the gradient's root mean square."""


@dataclass(frozen=True, kw_only=True)
class SplineGradient:
    """The mean gradient of a KAN's first layer, in the units of equation (1)."""

    tensor: Tensor
    """(m, d, K) float64: Σ_n δ_in b_k(u_nj), for m hidden units and d entries of an image."""
    noise: float
    """Standard deviation of the noise in each entry of `tensor`, estimated from it."""
    degree: int
    intervals: int
    model: Classifier
    """With the weights of the observed round."""

    @staticmethod
    def of(observation: Observation) -> SplineGradient:
        """Reads the gradient off an observation.

        The sums over k are the same for all entries j of an image; how they differ is noise.

        Raises:
            AttackFailed: the model is no KAN or has an imprint module in front, or nothing is left
                of its first layer's gradient.
        """
        if observation.model.name != "kan":
            raise AttackFailed(
                "spline bases are read off a Kolmogorov-Arnold network's first layer, and the "
                f"model is {observation.model.name}: use `model: kan`, or another attack"
            )
        config = KAN.model_validate(dict(observation.model.parameters))
        if config.imprint:
            raise AttackFailed(
                "an imprint module changes what the first layer meets: use attack imprint, or "
                "remove model.imprint"
            )
        model = rebuild(observation).double()
        layers = [name for name, part in model.body.named_modules() if isinstance(part, nn.Linear)]
        weight = observation.update[f"body.{layers[0]}.weight"].double()
        if not weight.any():
            raise AttackFailed(
                "nothing is left of the first layer's gradient: remove less of the update"
            )
        functions = basis_size(config.degree, config.intervals)
        entries = weight.shape[1] // functions
        factor = mean_gradient_factor(observation.training) * math.sqrt(entries)
        tensor = factor * weight.view(-1, entries, functions)
        differences = tensor.sum(2) - tensor.sum(2).mean(1, keepdim=True)
        freedom = differences.numel() - len(differences)
        variance = float(differences.square().sum()) / max(1, freedom)
        rounding = _ROUNDING * float(tensor.square().mean().sqrt())
        return SplineGradient(
            tensor=tensor,
            noise=max(rounding, math.sqrt(variance / functions)),
            degree=config.degree,
            intervals=config.intervals,
            model=model,
        )

    @property
    def hidden(self) -> int:
        """m."""
        return self.tensor.shape[0]

    def unexplained(self, bases: Tensor) -> Tensor:
        """Computes the share (0-d) of energy that no error signals of these (N, d, K) explain."""
        design, observed = bases.flatten(1).T, self.tensor.flatten(1).T
        residual: Tensor = observed - design @ torch.linalg.lstsq(design, observed).solution
        return residual.square().sum() / observed.square().sum()

    def error_signals(self, images: Tensor) -> Tensor:
        """Computes ∂ℓ/∂h (N, classes, m) float64 of normalized images (N, C, H, W), by class."""
        body = self.model.body
        assert isinstance(body, nn.Sequential)
        after = 1 + next(i for i, part in enumerate(body) if isinstance(part, nn.Linear))
        with torch.no_grad():
            hidden = body[:after](images.double())
        with torch.enable_grad():
            hidden.requires_grad_()
            log_probabilities = self.model.head(body[after:](hidden)).log_softmax(1)
            slopes = [
                torch.autograd.grad(-log_probabilities[:, k].sum(), hidden, retain_graph=True)[0]
                for k in range(log_probabilities.shape[1])
            ]
        return torch.stack(slopes, 1)


def abscissae(degree: int, intervals: int) -> Tensor:
    """Computes ξ (intervals + degree,) float64 with u = Σ_k ξ_k b_k(u) for u in [-1, 1]."""
    middle = torch.arange(intervals + degree, dtype=torch.float64) - (degree - 1) / 2
    return 2 * middle / intervals - 1
