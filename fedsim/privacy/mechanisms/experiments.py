"""Releases of the privacy calculator's mechanisms, drawn under either neighbour, and their scores.

What is drawn is the statistic that decides between the two neighbours (a sufficient statistic of
the full release; the tests draw full matrices as well), from the mechanism's own steps. `sabotage`
multiplies the noise: 0.8 draws what a mechanism with 20% less noise than it claims would release.
The score is the likelihood ratio's logarithm under the noise that was really drawn, as of an
attacker who knows the code: no other test is stronger (Neyman and Pearson).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsim.privacy.contract import Count, Curve, Experiment, Size
from fedsim.privacy.mechanisms.gaussian_sampling import GaussianSamplingCurve, Neighbours
from fedsim.privacy.mechanisms.regression import Leverages

Floats = NDArray[np.float64]
Leverage = Annotated[float, Field(ge=0, lt=1)]
Sabotage = Annotated[float, Field(ge=1e-3, le=1e3)]


class _Sabotaged(Experiment):
    sabotage: Sabotage = 1.0
    """What the noise's standard deviation is multiplied with, behind the claim's back."""

    @abstractmethod
    def curve(self) -> Curve:
        """What is claimed: the mechanism as declared, without `sabotage`."""

    def neighbours(self) -> str:
        """Those of the curve."""
        return self.curve().neighbours()

    def claim(self, delta: float) -> float:
        """The ε that the mechanism's curve has at δ."""
        return self.curve().epsilon(delta).epsilon


@final
class GaussianExperiment(_Sabotaged):
    """A number that the row moves by `sensitivity`, behind Gaussian noise."""

    gaussian_dp: ClassVar[bool] = True
    sensitivity: Size = 1.0
    """How far one row moves what is released, in L2 norm."""
    sigma: Size
    """Standard deviation of the noise, in the same units."""

    def curve(self) -> Curve:
        """The Gaussian mechanism's."""
        from fedsim.privacy.mechanisms.gaussian import GaussianCurve

        return GaussianCurve(sensitivity=self.sensitivity, sigma=self.sigma)

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios."""
        sigma = self.sabotage * self.sigma
        moved = self.sensitivity * present + sigma * rng.standard_normal(draws)
        return self.sensitivity * (moved - self.sensitivity / 2) / sigma**2


@final
class RandomProjectionExperiment(_Sabotaged):
    """r random combinations of a regularized database's rows, seen along the row v that is doubted.

    Of A' G the r columns are N(0, A'A); along M⁻¹v, M = A'A with the row, they have variance p with
    it and p (1 - p) without. `sabotage` scales the regularization, as where the row stands alone
    against it.
    """

    leverage: Leverage
    """p = v' M⁻¹ v of the row, in the regularized database that holds it."""
    r: Count
    """Random combinations released."""

    def curve(self) -> Curve:
        """Random projection's."""
        from fedsim.privacy.mechanisms.projection import RandomProjectionCurve

        return RandomProjectionCurve(leverage=self.leverage, r=self.r)

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios."""
        p = regularized(self.leverage, self.sabotage)
        variance = p if present else p * (1 - p)
        squares = variance * rng.chisquare(self.r, draws)
        return squares / (2 * (1 - p)) + self.r / 2 * math.log1p(-p)


@final
class LeastSquaresExperiment(Leverages, _Sabotaged):
    """N(x, |e|² (B'B)⁻¹ / r) for least squares' solution x and residuals e, seen along one row.

    In units of the release with the row, the release without it has mean m and variance v along
    M^-½ b and variance w in the other d - 1 directions. `sabotage` scales the regularization.
    """

    p: Leverage
    """Leverage of the row in B."""
    q: Leverage
    """Leverage of the row in [B, b]; at least p."""

    def curve(self) -> Curve:
        """Least squares'."""
        from fedsim.privacy.mechanisms.regression import LeastSquaresCurve

        return LeastSquaresCurve(p=self.p, q=self.q, r=self.r, d=self.d)

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios."""
        p, q = regularized(self.p, self.sabotage), regularized(self.q, self.sabotage)
        mean = -math.sqrt(self.r * p * max(0.0, q - p)) / (1 - p)  # rounded, q may be less
        along, across = (1 - q) / (1 - p) ** 2, (1 - q) / (1 - p)
        first = rng.standard_normal(draws)
        others = rng.chisquare(self.d - 1, draws) if self.d > 1 else np.zeros(draws)
        if not present:
            first, others = mean + math.sqrt(along) * first, across * others
        ratio = ((first - mean) ** 2 / along - first**2 + others / across - others) / 2
        return ratio + (math.log(along) + (self.d - 1) * math.log(across)) / 2


@final
class TruncatedLaplaceExperiment(_Sabotaged):
    """A number that the row moves by `sensitivity`, behind truncated Laplace noise."""

    sensitivity: Size = 1.0
    """How far one row moves the number."""
    scale: Size
    """b of the density exp(-|x| / b), in the units of the release."""
    bound: Size
    """The largest magnitude of the noise, in the units of the release."""

    def curve(self) -> Curve:
        """Truncated Laplace noise's."""
        from fedsim.privacy.mechanisms.laplace import TruncatedLaplaceCurve

        return TruncatedLaplaceCurve(
            sensitivity=self.sensitivity, scale=self.scale, bound=self.bound
        )

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios; infinite where only one neighbour can be the source."""
        scale, bound = self.sabotage * self.scale, self.sabotage * self.bound
        size = -scale * np.log1p(np.expm1(-bound / scale) * rng.random(draws))
        moved = self.sensitivity * present + rng.choice([-1.0, 1.0], draws) * size
        # |x| - |x - s|, without the rounding that would tell the neighbours apart
        ratio: NDArray[np.float64]
        ratio = np.clip(2 * moved - self.sensitivity, -self.sensitivity, self.sensitivity) / scale
        ratio[moved > bound] = math.inf
        ratio[moved < self.sensitivity - bound] = -math.inf
        return ratio


@final
class GaussianSamplingExperiment(Neighbours, _Sabotaged):
    """k draws of N(0, K) against k of N(0, K'), in the directions in which the two differ.

    Of beta and lift these are the two of the worst neighbours. Of a distance M it is one, in which
    K' has 1 / (1 - M) times K's variance: the worst pair, but for ε so small that more directions
    are. `sabotage` acts on k, whose square root is what more draws take from the noise of their
    mean: 0.8 is k / 0.64 draws.
    """

    k: Count
    """Draws."""
    distance: Annotated[float | None, Field(ge=1e-12, lt=1)] = None
    """M = |K^½ K'⁻¹ K^½ - I|, in Frobenius norm."""

    @model_validator(mode="after")
    def _some_draws(self) -> GaussianSamplingExperiment:
        if self._drawn < 1:
            raise ValueError(
                f"sabotage: {self.sabotage:g} leaves no draw of k = {self.k}; use at most "
                f"{math.floor(100 * math.sqrt(self.k)) / 100:g}, or a larger k"
            )
        return self

    @property
    def _drawn(self) -> int:
        return round(self.k / self.sabotage**2)

    def curve(self) -> Curve:
        """Gaussian sampling's."""
        return GaussianSamplingCurve(
            k=self.k,
            distance=self.distance,
            beta=self.beta,
            lift=self.lift,
            gain=self.gain,
            row_norm=self.row_norm,
        )

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios; `present` is K'."""
        count, known = self._drawn, self.eigenvalues()
        up, down = (0.0, self.apart()) if known is None else known[0]
        ratio = np.zeros(draws)
        for a in filter(None, (-up, down)):
            squares = rng.chisquare(count, draws) / (1 - a if present else 1.0)
            ratio += a * squares / 2 + count / 2 * math.log1p(-a)
        return ratio


@final
class PoissonGaussianExperiment(_Sabotaged):
    """DP-SGD's steps with Poisson sampling: each takes the row with probability `sampling_rate`."""

    unit: ClassVar[str] = "example"
    steps: Annotated[int, Field(ge=1, le=10_000)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1e12)]
    """Standard deviation of a step's noise over the bound of one row's contribution."""

    def curve(self) -> Curve:
        """That of dp_accounting, by privacy loss distributions (rounded up)."""
        from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve

        return CorrelatedCurve(
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            sampling="poisson",
            noise_multiplier=self.noise_multiplier,
        )

    def work(self) -> int:
        """See `Experiment`."""
        return self.steps

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Floats:
        """(draws,) log likelihood ratios, summed over the steps."""
        sigma = self.sabotage * self.noise_multiplier
        total = np.zeros(draws)
        for _ in range(self.steps):
            seen = sigma * rng.standard_normal(draws)
            if present:
                seen += rng.random(draws) < self.sampling_rate
            total += np.log1p(self.sampling_rate * np.expm1((seen - 0.5) / sigma**2))
        return total


def regularized(leverage: float, sabotage: float) -> float:
    """The leverage of a row that stands alone, |v|² / (|v|² + σ²), once σ is `sabotage` times it.

    >>> regularized(0.5, 1.0), regularized(0.5, 0.5)
    (0.5, 0.8)
    """
    return leverage / (leverage + sabotage**2 * (1 - leverage))
