"""A two-layer Kolmogorov-Arnold network with B-splines on both layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsim import rng
from fedsim.models.base import Classifier, HeadDropout, ModelPlugin, activation
from fedsim.models.head import make_head


@final
class KAN(ModelPlugin):
    """f(x) = m^(-1/2) Σ_k c_k · b(σ(h_k)), h_k = d^(-1/2) w_k · b(tanh(x)), b the spline basis.

    x is the flattened image of d entries, squashed into the splines' interval [-1, 1]. w_k and c_k
    are the coefficients of hidden unit k: those of all entries' bases, and for each class those of
    its own basis. With two classes cross-entropy is the paper's logistic loss of the difference of
    the logits.
    """

    paper: ClassVar[str] = (
        "Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated "
        "Noise, 2026, section 3.1; Liu et al., KAN: Kolmogorov-Arnold Networks, ICLR 2025"
    )

    hidden: Annotated[int, Field(gt=0, le=1 << 16)] = 32
    """m, the number of hidden units."""
    degree: Annotated[int, Field(ge=1, le=7)] = 3
    """Degree of the splines; the paper assumes cubic or higher."""
    intervals: Annotated[int, Field(ge=1, le=256)] = 5
    """Number of pieces that [-1, 1] is cut into; there are intervals + degree basis functions."""
    activation: Literal["tanh", "sigmoid"] = "tanh"
    """σ, which brings hidden units into the splines' interval."""
    train: Literal["first", "all"] = "all"
    """`first`: the second layer stays as it was drawn, as in the paper. `all`: both are trained."""
    init_scale: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    """Standard deviation of both layers' coefficients at the start."""
    second_layer_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the fixed second layer under `train: first`. It is public, as the architecture is."""

    @model_validator(mode="after")
    def _head_is_trained(self) -> KAN:
        if self.head is not None and self.train == "first":
            raise ValueError("kan: a head takes the place of the second layer: use train: all")
        return self

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network, with hidden x (intervals + degree) features, for any (C, H, W)."""
        size = math.prod(input_shape)
        functions = basis_size(self.degree, self.intervals)
        first = nn.Linear(size * functions, self.hidden, bias=False)
        nn.init.normal_(first.weight, std=self.init_scale)
        body = nn.Sequential(
            nn.Flatten(),
            nn.Tanh(),
            _Basis(self.degree, self.intervals, 1 / math.sqrt(size)),
            first,
            activation(self.activation),
            _Basis(self.degree, self.intervals, 1 / math.sqrt(self.hidden)),
        )
        width = self.hidden * functions
        if self.head is not None:
            return Classifier(body, make_head(self.head, width, num_classes))
        if self.train == "first":
            # An attacker who rebuilds it knows no seed of the run, and no release holds this layer.
            stream = rng.generator(self.second_layer_seed, "kan", "second layer")
            fixed = torch.randn(num_classes, width, generator=stream)
            return Classifier(body, _FixedReadout(self.init_scale * fixed))
        output = nn.Linear(width, num_classes, bias=False)
        nn.init.normal_(output.weight, std=self.init_scale)
        return Classifier(body, nn.Sequential(OrderedDict(dropout=HeadDropout(), output=output)))


class _Basis(nn.Module):
    """Multiplies the spline basis of each entry by `scale`: (B, d) -> (B, d x functions)."""

    def __init__(self, degree: int, intervals: int, scale: float) -> None:
        super().__init__()
        self._degree, self._intervals, self._scale = degree, intervals, scale

    def forward(self, x: Tensor) -> Tensor:
        return self._scale * spline_basis(x, self._degree, self._intervals).flatten(1)


class _FixedReadout(nn.Module):
    """Maps (B, d) to (B, K) by a weight that no update and no release contains, and never moves."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, features: Tensor) -> Tensor:
        # A plain attribute does not follow its module to a device.
        return features @ self._weight.to(features).T


def basis_size(degree: int, intervals: int) -> int:
    """Returns the number of B-splines of `degree` over `intervals` pieces: degree + intervals."""
    return intervals + degree


def spline_basis(x: Tensor, degree: int, intervals: int) -> Tensor:
    """Evaluates every B-spline of `degree` at `x`: floats (...,) -> (..., intervals + degree).

    x is in [-1, 1], which is cut into `intervals` equal pieces. The knots continue evenly beyond,
    so that the functions are non-negative, sum to 1 and are degree - 1 times continuously
    differentiable. The pieces are half-open, the last one closed. Source: de Boor, A Practical
    Guide to Splines, Springer 1978, chapter X (the recursion of Cox and de Boor).
    """
    position = (x + 1) * (intervals / 2)  # in units of a piece, 0 to `intervals`
    # The piece is constant almost everywhere: no gradient. The clamp closes the last one.
    piece = position.detach().floor().clamp(0, intervals - 1)
    # knot j lies at j - degree; of degree 0 there are functions for all pieces that reach in
    start = torch.arange(-degree, intervals + degree, device=x.device, dtype=x.dtype)
    basis = (piece[..., None] == start).to(x.dtype)
    position = position[..., None]
    for order in range(1, degree + 1):
        # Function j rises from its first knot on, and falls to zero order + 1 knots later.
        rise = (position - start[:-order]) / order
        fall = (start[order:] + 1 - position) / order
        basis = rise * basis[..., :-1] + fall * basis[..., 1:]
    return basis
