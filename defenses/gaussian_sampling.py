"""Gaussian sampling: a kernel matrix is released as the covariance of a few draws from it."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, final

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.defense import StatisticDefense
from fedsim.contracts.guarantee import Release
from fedsim.privacy.mechanisms import kernel_distance, wishart
from fedsim.privacy.mechanisms.gaussian_sampling import SamplingRelease
from fedsim.rng import normal
from fedsim.types import FedsimError

_Positive = Annotated[float, Field(gt=0, le=1e12)]
_CHUNK = 4096  # draws that are held at once
_MOST = 100_000  # draws beyond which nothing is gained: every entry is within 0.3% of its size
_ROUNDING = 1e-9
"""Relative error of a measured eigenvalue, beside what the largest leaves of it. A claim changes as
little by it."""


@final
class GaussianSampling(StatisticDefense):
    """Releases a kernel matrix K as K̃ = (1/k) Σ g g' of k draws g of N(0, K + γ I).

    The draws hide a change of one example's features by at most β in L2 norm; labels are not
    hidden. The more draws, the better K̃ and the less private. They are private as far as the
    matrices of neighbours are close, relative to their least eigenvalues. `lift` adds γ I, so that
    the claim holds whatever the data are: it acts as a ridge of γ in the regression, on top of the
    learner's. `least_eigenvalue` assumes one instead, as the paper does. The claim is then
    *relative*, for it holds among such databases alone.

    Exactly one of these two is given, and either `samples` or `epsilon` with `delta`.
    """

    paper: ClassVar[str] = (
        "Gu, Liang, Sha, Shi and Song, Differential Privacy Mechanisms in Neural Tangent Kernel "
        "Regression, Algorithm 1 (after Alabi et al., Privately Estimating a Gaussian, STOC 2023); "
        "the distance and the curve: fedsim.privacy.mechanisms.kernel_distance and "
        "fedsim.privacy.mechanisms.wishart"
    )
    statistic = "kernel"

    beta: _Positive
    """β: neighbours differ in one example, whose features are no farther apart in L2 norm."""
    samples: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """k: number of draws. With 0 K̃ is zero, and nothing of K is released: the control α = Y / λ."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """ε of K̃ alone: k is the largest that keeps to it, but at most 100,000."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """δ of `epsilon`."""
    lift: _Positive | None = None
    """γ: the multiple of the identity that is added to K."""
    least_eigenvalue: _Positive | None = None
    """η, which no eigenvalue of any K is taken to be below. Whoever computes it from the data
    reveals something by it."""

    @model_validator(mode="after")
    def _one_of_each(self) -> GaussianSampling:
        if (self.epsilon is None) != (self.delta is None) or (self.samples is None) == (
            self.epsilon is None
        ):
            raise ValueError("gaussian_sampling takes samples, or else both epsilon and delta")
        if (self.lift is None) == (self.least_eigenvalue is None):
            raise ValueError("gaussian_sampling takes exactly one of lift and least_eigenvalue")
        return self

    @property
    def assumes(self) -> bool:
        """Whether `least_eigenvalue` is given: the claim then holds only if `check` passes."""
        return self.least_eigenvalue is not None

    def check(self, client: int, value: Tensor) -> None:
        """Refuses, by a FedsimError, `value` (n, n) with an eigenvalue below `least_eigenvalue`."""
        if self.least_eigenvalue is None or not len(value):
            return
        eigenvalues = torch.linalg.eigvalsh(value)
        # An eigenvalue is known only up to the rounding of the largest: the assumption is tested
        # against what is certain.
        lost = len(value) * torch.finfo(value.dtype).eps * float(eigenvalues[-1])
        found = max(float(eigenvalues[0]) - lost, 0.0)
        if found < self.least_eigenvalue * (1 - _ROUNDING):
            raise FedsimError(
                f"gaussian_sampling.least_eigenvalue: expected none below "
                f"{self.least_eigenvalue:g}, got {found:.6g} in the kernel matrix of client "
                f"{client}, so that the claim would not hold; declare what holds of every database "
                "to hide among, or set lift instead, whose claim holds of any"
            )

    def apply(self, value: Tensor, release: Release, rng: torch.Generator) -> Tensor:
        """Returns a private matrix (n, n) for kernel matrix `value`; FedsimError as `guarantee`."""
        lifted = value + (self.lift or 0.0) * torch.eye(len(value), dtype=value.dtype)
        samples = self.guarantee(release).samples
        return sampled_covariance(square_root(lifted), samples, rng)

    def guarantee(self, release: Release) -> SamplingRelease:
        """Returns what is proven of the draws; FedsimError if not even one keeps to `epsilon`."""
        gain, row_norm = release.gain, release.row_norm
        if self.lift is not None:
            change = kernel_distance.eigenvalues_under_lift(
                self.beta, self.lift, gain=gain, row_norm=row_norm
            )
        else:
            assert self.least_eigenvalue is not None
            change = kernel_distance.eigenvalues_above_floor(
                self.beta, self.least_eigenvalue, gain=gain, row_norm=row_norm
            )
        # Tuples are hashable, as caches of the release need it.
        eigenvalues = tuple((up, down) for up, down in change.tolist())
        samples = self.samples
        if samples is None:
            assert self.epsilon is not None and self.delta is not None
            samples = _most_draws(eigenvalues, self.epsilon, self.delta)
        return SamplingRelease(
            unit="example",
            relation="close" if self.lift is not None else "relative",
            beta=self.beta,
            samples=samples,
            eigenvalues=eigenvalues,
        )

    def public_parameters(self, release: Release) -> dict[str, float]:
        """Returns `samples`, the number of draws, and `lift` or 0; FedsimError as `guarantee`."""
        return {"samples": self.guarantee(release).samples, "lift": self.lift or 0.0}


def square_root(gram: Tensor) -> Tensor:
    """Returns an (n, n) root R of the kernel matrix `gram` K, which may be singular: R R' = K."""
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(gram)
    if int(info):
        # Rounding may leave eigenvalues below 0, which have no root.
        values, vectors = torch.linalg.eigh(gram)
        lower = vectors * values.clamp(min=0).sqrt()
    return lower


def sampled_covariance(root: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws K̃ (n, n) = (1/k) Σ g g' of k = `count` draws g of N(0, K), where K = root root'.

    `root` is (n, m). A `count` of 0 gives zeros. Source: that of `GaussianSampling`.
    """
    inner = torch.zeros(root.shape[1], root.shape[1], dtype=root.dtype)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        part = normal((root.shape[1], size), generator, root.dtype)
        # Squares are summed before the root is applied: two
        # products in all, in place of two a chunk.
        inner += part @ part.T
    return root @ inner @ root.T / max(count, 1)


@cache
def _most_draws(eigenvalues: tuple[tuple[float, float], ...], epsilon: float, delta: float) -> int:
    change = np.array(eigenvalues)
    # δ rises with the number of draws: if the most are private, none has to be searched for.
    if wishart.log_delta_of(_MOST, change, epsilon) <= np.log(delta):
        return _MOST
    found = wishart.max_draws(change, epsilon, delta)
    if found == 0:
        raise FedsimError(
            f"gaussian_sampling: not even one draw is ({epsilon:g}, {delta:g})-private where an "
            f"eigenvalue of neighbours' kernel matrices may differ by {change.max():.1%}; raise "
            "lift (or the least eigenvalue, if that is true), raise epsilon, or lower beta"
        )
    return found
