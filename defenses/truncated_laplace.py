"""Truncated Laplace noise on features, for examples that move by little."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import StatisticDefense
from fedsim.contracts.guarantee import Release
from fedsim.privacy.mechanisms import laplace_vector
from fedsim.privacy.mechanisms.laplace_vector import LaplaceRelease
from fedsim.rng import signs, uniform


@final
class TruncatedLaplace(StatisticDefense):
    """Adds noise of density ~ exp(-|x| / b) within ± B to every entry of the features.

    The noise hides a change of one example's features by at most β in L2 norm; labels are not
    hidden. The scale b and the bound B follow from ε, δ and β. No entry changes by more than B.
    """

    paper: ClassVar[str] = (
        "Geng, Ding, Guo and Kumar, Tight Analysis of Privacy and Utility Tradeoff in Approximate "
        "Differential Privacy, AISTATS 2020; on features: Gu, Liang, Sha, Shi and Song, "
        "Differential Privacy Mechanisms in Neural Tangent Kernel Regression, Lemma G.2"
    )
    statistic = "features"

    beta: Annotated[float, Field(gt=0, le=1e12)]
    """β: neighbours differ in one example, whose features are no farther apart in L2 norm."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    calibration: laplace_vector.ScaleChoice = "tight"
    """`paper`: b = sqrt(d) β / ε for d features, that of one number with their L1 sensitivity.
    `tight`: the least b that is proven to be enough, smaller by up to sqrt(d) / 1.25."""

    def apply(self, value: Tensor, release: Release, rng: torch.Generator) -> Tensor:
        """Returns `value` (n, d) with noise on every entry. See `StatisticDefense.apply`."""
        made = self.guarantee(release)
        return truncated_laplace(value, made.scale, made.bound, rng)

    def guarantee(self, release: Release) -> LaplaceRelease:
        """Returns the mechanism of the noise in use. See `StatisticDefense.guarantee`."""
        scale, bound = laplace_vector.calibrate_noise(
            self.beta, release.features, self.epsilon, self.delta, self.calibration
        )
        return LaplaceRelease(
            unit="example",
            relation="close",
            beta=self.beta,
            scale=scale,
            bound=bound,
            dimension=release.features,
        )

    def public_parameters(self, release: Release) -> dict[str, float]:
        """Returns the noise's `scale` and `bound`. See `StatisticDefense.public_parameters`."""
        made = self.guarantee(release)
        return {"scale": made.scale, "bound": made.bound}


def truncated_laplace(
    value: Tensor, scale: float, bound: float, generator: torch.Generator
) -> Tensor:
    """Returns `value` with noise of density ~ exp(-|x| / scale) within ± `bound` on each entry.

    Args:
        value: tensor of any shape, on the CPU.
        scale: b > 0, in the units of `value`.
        bound: largest magnitude of the noise, in the same units.
        generator: source of the noise, on the CPU.
    """
    shape = value.shape
    share = uniform(shape, generator)
    # The inverse distribution function of the truncated exponential, at a uniform share.
    size = -scale * torch.log1p(math.expm1(-bound / scale) * share)
    return value + signs(shape, generator) * size
