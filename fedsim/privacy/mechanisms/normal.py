"""The calculator's mechanism `normal`: any two normal distributions, read from a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedsim.privacy.contract import WAYS, Answer, Direction, ExactCurve, KnownMechanism
from fedsim.privacy.numerics import quadratic
from fedsim.privacy.numerics.special import Array, require_delta, require_epsilon, require_range
from fedsim.system import paths
from fedsim.types import FedsimError
from fedsim.words import number_of

_ROUNDING = 64 * np.finfo(float).eps
"""Share of the largest, over the dimension, up to which an eigenvalue counts as 0."""
_LARGEST = 1e100
"""Largest number in a mean or a covariance: squares must not overflow."""
_LARGE = f"{{}}: holds a number beyond ± {_LARGEST:g}; use other units of measurement"
_FARTHEST = 1e30
"""Standard deviations between the means beyond which ε is not looked for."""
_CERTAIN = 1e-10
"""Share of the largest from which an eigenvalue is certainly not 0."""


@dataclass(frozen=True)
class NormalPair:
    """Holds the log-likelihood ratio of normal distributions N1 and N2; `pair` makes it.

    At draws x of N1, log N2(x) / N1(x) is Σ_j (a_j Z_j² / 2 + b_j Z_j) + c of d standard normal
    Z_j. The constant c follows from the others: the mean of N2 / N1 is 1. Signs of b_j make no
    difference. `apart` says that the two have different supports: then every δ is 1, and the arrays
    are empty.
    """

    a: Array
    """(d,) a_j < 1."""
    rest: Array
    """(d,) 1 - a_j, known to full precision."""
    shift: Array
    """(d,) b_j²."""
    apart: bool = False

    def log_delta(self, epsilon: ArrayLike) -> Array:
        """Computes ln δ of N1 against N2 at ε >= 0, in its shape; a FedsimError for other ε.

        >>> two = pair([0, 0], [[1, 0], [0, 2]], [1, 0], [[1, 0], [0, 1]])
        >>> float(np.exp(two.log_delta(0.5)).round(6))
        0.284452
        """
        eps = require_epsilon(epsilon)
        if self.apart:
            return np.zeros(eps.shape)[()]
        return quadratic.log_delta(self.a, self.rest, self.shift, np.ones_like(self.a), eps)

    def epsilon(self, delta: ArrayLike) -> Array:
        """Computes the least ε >= 0 at which δ(ε) is at most `delta`, in its shape.

        The result is inf where the supports differ. A FedsimError says that δ is not in (0, 1), or
        that the means are more than 1e30 standard deviations apart.
        """
        target = require_delta(delta)
        if self.apart:
            return np.full(target.shape, np.inf)[()]
        if (self.shift > _FARTHEST**2).any():
            raise FedsimError(
                f"mean1 and mean2: more than {_FARTHEST:g} standard deviations apart, where ε is "
                "not looked for; ask for delta"
            )
        return quadratic.epsilon(self.a, self.rest, self.shift, np.ones_like(self.a), target)

    def _log_ratio(self, z: Array) -> Array:
        """Computes (...) log N1(x) / N2(x) at draws x of N1, as standard normal z (..., d)."""
        # With this constant E[exp(-L)] = 1 under the first
        # distribution, as of any likelihood ratio.
        constant = (np.log(self.rest) - self.shift / self.rest).sum() / 2
        return np.asarray(-(z**2 @ self.a / 2 + z @ np.sqrt(self.shift) + constant))


def pair(mean1: ArrayLike, cov1: ArrayLike, mean2: ArrayLike, cov2: ArrayLike) -> NormalPair:
    """Returns the log-likelihood ratio of N1 = N(mean1, cov1) and N2 = N(mean2, cov2).

    Directions in which neither varies are left out, if the means agree there. If they do not, or
    only one distribution varies in a direction, the supports differ (`apart`).

    Args:
        mean1: (d,) mean of the first distribution.
        cov1: (d, d) covariance of the first, symmetric and positive semidefinite.
        mean2: (d,) mean of the second.
        cov2: (d, d) covariance of the second.

    Raises:
        FedsimError: a shape does not fit, a number is not finite or beyond ± 1e100, a covariance is
            not symmetric, indefinite, or so ill-conditioned that its rank cannot be told.
    """
    means = [_array(name, mean, 1) for name, mean in (("mean1", mean1), ("mean2", mean2))]
    covs = [_covariance(name, cov) for name, cov in (("cov1", cov1), ("cov2", cov2))]
    size = len(means[0])
    for name, array in (("mean2", means[1]), ("cov1", covs[0]), ("cov2", covs[1])):
        if len(array) != size:
            raise FedsimError(
                f"{name}: has {len(array)} dimensions, mean1 has {size}; all four have to agree"
            )
    gap = means[0] - means[1]
    # Units of measurement do not matter: both are scaled to a joint variance of 1.
    spread = np.sqrt(np.diag(covs[0]) + np.diag(covs[1]))
    # A coordinate that varies under neither tells them apart for sure if the means differ there.
    if gap[spread == 0].any():
        return _apart()
    kept = spread > 0
    if not kept.any():
        return NormalPair(np.zeros(1), np.ones(1), np.zeros(1))
    scale = 1 / spread[kept]
    gap = gap[kept] * scale
    covs = [cov[np.ix_(kept, kept)] * np.outer(scale, scale) for cov in covs]
    # The null space of the sum has the other directions in which neither varies.
    values, vectors = np.linalg.eigh(covs[0] + covs[1])
    rank = _positive("cov1 + cov2", values)
    inside, outside = vectors[:, rank], vectors[:, ~rank]
    if np.abs(gap @ outside).max(initial=0.0) > np.sqrt(_ROUNDING) * max(1.0, np.abs(gap).max()):
        return _apart()
    gap = gap @ inside
    covs = [_symmetric(inside.T @ cov @ inside) for cov in covs]
    # A direction in which only one of the two varies makes their supports differ.
    for name, cov in (("cov1", covs[0]), ("cov2", covs[1])):
        if not _positive(name, np.linalg.eigvalsh(cov)).all():
            return _apart()
    first, second = (np.linalg.cholesky(cov) for cov in covs)
    # a is 1 less eigenvalues of Σ2^(-1/2) Σ1 Σ2^(-1/2). The covariances' difference keeps its
    # digits where the two are alike.
    solved = np.linalg.solve(second, np.linalg.solve(second, covs[1] - covs[0]).T)
    a, vectors = np.linalg.eigh(_symmetric(solved))
    if np.abs(a).max() > _LARGEST:  # its square is computed with
        raise FedsimError(
            f"cov1 and cov2: variances differ by a factor of more than {_LARGEST:g}; drop the "
            "dimensions that hardly vary"
        )
    # 1 - a as a sum of squares: positive, and exact where a is close to 1.
    root = np.linalg.solve(second, first).T @ vectors
    rest = (root**2).sum(0)
    shift = rest * (vectors.T @ np.linalg.solve(second, gap)) ** 2
    return NormalPair(a, rest, shift)


def _estimate(
    pair: NormalPair, epsilon: float, *, error: float, confidence: float, rng: np.random.Generator
) -> tuple[float, int]:
    """Returns (δ, draws): an estimate within `error` of δ with probability `confidence`."""
    # The mean of (1 - exp(ε - L))+, L = log N1(x) / N2(x) at draws x of N1. By Hoeffding's
    # inequality it takes log(2 / γ) / (2 α²) draws, α the error and 1 - γ the confidence.
    # Half of what is left below 1 may be lost in rounding.
    require_range("confidence", confidence, 0.0, np.nextafter(1.0, 0.0), "a number in (0, 1)")
    draws = math.ceil(math.log(2 / (1 - confidence)) / (2 * error**2))
    if draws > 10**9:
        raise FedsimError(f"error: {error:g} takes {number_of(draws, 'draw')}; use a larger one")
    if pair.apart:
        return 1.0, draws
    total, done, size = 0.0, 0, max(1, (1 << 22) // len(pair.a))
    while done < draws:
        part = min(size, draws - done)
        ratio = pair._log_ratio(rng.standard_normal((part, len(pair.a))))
        # (1 - exp(ε - L))+ is 1 - exp(min(ε - L, 0)).
        total += float(-np.expm1(np.minimum(epsilon - ratio, 0.0)).sum())
        done += part
    return total / draws, draws


def _apart() -> NormalPair:
    none = np.empty(0)
    return NormalPair(none, none, none, apart=True)


def _array(name: str, value: Any, dimensions: int) -> Array:
    words = {1: "a list of numbers", 2: "a square list of lists of numbers"}[dimensions]
    try:
        array = np.array(value, dtype=np.float64)
    except OverflowError as error:
        raise FedsimError(_LARGE.format(name)) from error
    except (TypeError, ValueError) as error:
        raise FedsimError(f"{name}: expected {words}; got {type(value).__name__}") from error
    if array.ndim != dimensions or array.size == 0:
        raise FedsimError(f"{name}: expected {words}; got the shape {array.shape}")
    if not np.isfinite(array).all():
        raise FedsimError(f"{name}: holds a value that is not finite; every entry has to be")
    if np.abs(array).max() > _LARGEST:
        raise FedsimError(_LARGE.format(name))
    return array


def _covariance(name: str, value: Any) -> Array:
    array = _array(name, value, 2)
    if array.shape[0] != array.shape[1]:
        raise FedsimError(f"{name}: expected a square matrix; got the shape {array.shape}")
    largest = np.abs(array).max()
    worst = np.abs(array - array.T).max()
    if worst > 1e-9 * largest:
        raise FedsimError(
            f"{name}: not symmetric (entries differ by up to {worst:g}); use (S + S') / 2"
        )
    array = _symmetric(array)
    lowest = float(np.linalg.eigvalsh(array)[0])
    # Rounding may put an eigenvalue of 0 that far below it.
    if lowest < -_ROUNDING * len(array) * largest:
        raise FedsimError(
            f"{name}: not a covariance, its least eigenvalue is {lowest:g}; no variance may be "
            "negative"
        )
    return array


def _symmetric(array: Array) -> Array:
    return (array + array.T) / 2


def _positive(name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    share = values / values[-1]
    # Between the two thresholds an eigenvalue may be rounding or not: neither answer is safe.
    unsure = (share > _ROUNDING * len(values)) & (share < _CERTAIN)
    if unsure.any():
        raise FedsimError(
            f"{name}: too ill-conditioned (an eigenvalue of {share[unsure][0]:.1e} of the largest) "
            "to tell whether it is singular; drop or combine the dimensions that depend on others"
        )
    return np.asarray(share >= _CERTAIN)


class _NormalCurve(ExactCurve):
    formula: ClassVar[str] = "contour integral (Lu et al., Theorem 1)"
    unit: ClassVar[str] = "unit unknown"
    file: Path
    """A JSON file with mean1, cov1, mean2 and cov2: lists of d numbers and d lists of d numbers."""
    method: Literal["exact", "monte_carlo"] = "exact"
    """`monte_carlo`: the paper's estimator, for δ only."""
    error: float = Field(default=0.001, ge=1e-12, lt=1)
    """Half the width of `monte_carlo`'s interval."""
    confidence: float = Field(default=0.99, gt=0, lt=1)
    """Probability that `monte_carlo`'s interval contains δ."""
    seed: int = Field(default=0, ge=0)
    """Seed of `monte_carlo`'s draws."""

    def neighbours(self) -> str:
        return "the two distributions"

    def delta(self, epsilon: float) -> Answer:
        if self.method == "monte_carlo":
            return self._estimate(epsilon)
        return super().delta(epsilon)

    def epsilon(self, delta: float) -> Answer:
        if self.method == "monte_carlo":
            raise FedsimError("method: monte_carlo estimates δ only; use method=exact for ε")
        return super().epsilon(delta)

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        return {way: pair.log_delta(epsilons) for way, pair in self._pairs().items()}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        return {way: float(pair.epsilon(delta)) for way, pair in self._pairs().items()}

    def _pairs(self) -> dict[Direction, NormalPair]:
        read = _read(self.file)
        ones, twos = (read["mean1"], read["cov1"]), (read["mean2"], read["cov2"])
        return dict(zip(WAYS, (pair(*ones, *twos), pair(*twos, *ones)), strict=True))

    def _estimate(self, epsilon: float) -> Answer:
        pairs = self._pairs()
        # Either direction may fail: each gets half of what the confidence leaves.
        keys = {"error": self.error, "confidence": (1 + self.confidence) / 2}
        rng = np.random.default_rng(self.seed)
        found = {way: _estimate(each, epsilon, rng=rng, **keys) for way, each in pairs.items()}
        way = max(found, key=lambda each: found[each][0])
        delta, draws = found[way]
        with np.errstate(divide="ignore"):
            log_delta = float(np.log(delta))
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=log_delta,
            method="Monte-Carlo with Hoeffding's bound, "
            f"{number_of(draws, 'draw')} (Lu et al., Figure 2)",
            direction=way,
            interval=(max(0.0, delta - self.error), min(1.0, delta + self.error)),
            confidence=self.confidence,
        )


def _read(path: Path) -> dict[str, Any]:
    names = ("mean1", "cov1", "mean2", "cov2")
    try:
        read = json.loads(paths.text(path, paths.TEXT))
    except OSError as error:
        raise FedsimError(f"file: {path} cannot be read ({error.strerror}); check it") from error
    except (ValueError, RecursionError) as error:  # also of a number of too many digits
        raise FedsimError(f"file: {path} is not JSON ({error}); write it anew") from error
    if not isinstance(read, dict):
        raise FedsimError(f"file: {path} holds no object; expected the keys {', '.join(names)}")
    missing = [name for name in names if name not in read]
    unknown = [name for name in read if name not in names]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has unknown keys: {', '.join(unknown)}"] if unknown else []
        raise FedsimError(f"file: {path} {' and '.join(said)}; expected {', '.join(names)}")
    return read


class KnownNormal(KnownMechanism):
    """Compares any two normal distributions, one for each neighbour."""

    curve = _NormalCurve
