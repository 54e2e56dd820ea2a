"""Computes the noise that closed forms of papers ask for, to compare with.

`sheffet_sigma`: Sheffet, Old Techniques in Differentially Private Linear Regression, ALT 2019, as
stated by Lu et al., The Normal Distributions Indistinguishability Spectrum, Figure 14.

`mutual_information_leverage`: Showkatbakhsh, Karakus and Diggavi, Privacy-Utility Trade-off of
Linear Regression under Random Projections and Additive Noise, ISIT 2018, bound by I a row's mutual
information with D'G + σ N, given all other rows. That implies (ε, δ) for every ε >= 0 with δ =
sqrt(2 I) (Cuff and Yu, Differential Privacy as a Mutual Information Constraint, CCS 2016). The
bound on I is our own: the largest Kullback-Leibler divergence from the release without the row.

`kan_*`: Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated
Noise, 2026. *Independent noise* by Theorem 5.4 (D.9): Lemma D.7's "dominant term" of the Rényi
divergences of a batch of fixed size (Wang, Balle and Kasiviswanathan, AISTATS 2019), which is no
bound where the noise is small or the order high. *Correlated noise* by Theorem F.12 (5.1 in the
body), as far as it is proven. Its constants are rebuilt: the published text has lost its formulas.
Its tail bound (Lemma F.10) counts participations, and its last step is the classical Gaussian
mechanism, proven for ε <= 1 only: where that falls short, the exact one stands in its place.
Theorem F.8, which it is derived from, states for batches of a fixed size what is true of Poisson
sampling.
"""

from __future__ import annotations

import math

import numpy as np

from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import Array, require_delta, require_range, solve
from fedsim.types import FedsimError


def sheffet_sigma(row_norm: float, r: float, epsilon: float, delta: float) -> float:
    """Computes σ of the rows σ I appended to data: sqrt(4 l² (sqrt(2 r log(4/δ)) + log(4/δ)) / ε).

    By Sheffet (ALT 2019), a Gaussian random projection of the data with these rows is then (ε,
    δ)-private. An argument out of its range is a FedsimError.

    Args:
        row_norm: l, above 0, at least the L2 norm of every row that any database may have. Sheffet
            takes it from the data: that releases l, and the noise of two neighbours then differs.
        r: number of columns of the projection, at least 1.
        epsilon: above 0.
        delta: in (0, 1).

    >>> round(sheffet_sigma(1.1075, 300, 1.0, 1 / 2809), 3)
    20.317
    """
    require_range("row_norm", row_norm, _LEAST, _MOST, "a number above 0")
    require_range("r", r, 1, _MOST, "a number of columns, at least 1")
    require_range("epsilon", epsilon, _LEAST, _MOST, "a number above 0")
    require_delta(delta)
    log = math.log(4 / delta)
    return 2 * row_norm * math.sqrt((math.sqrt(2 * r * log) + log) / epsilon)


def mutual_information_leverage(delta: float, r: float) -> float:
    """Computes the largest leverage of a row at which a release tells at most δ² / 2 nats of it.

    At that leverage or below, the noisy projection D'G + σ N onto `r` columns is (ε, δ)-private for
    every ε >= 0 (after Showkatbakhsh, Karakus and Diggavi, ISIT 2018). The leverage of a row v of D
    is v'(D'D + σ² I)^-1 v. A δ that is not in (0, 1), or r < 1, is a FedsimError.

    >>> f"{mutual_information_leverage(1e-3, 300):.3e}"
    '8.165e-05'
    """
    columns = float(require_range("r", r, 1.0, 1e300, "a number of columns, at least 1"))
    # Solved in logarithms: r (odds - log(1 + odds)) = δ²,
    # with the odds p / (1 - p) of the leverage.
    target = 2 * math.log(float(require_delta(delta))) - math.log(columns)

    def excess(log_odds: Array) -> tuple[Array, Array]:
        odds = np.exp(log_odds)
        # The difference cancels for small odds; the series' next term, odds⁴ / 6, is below
        # rounding.
        # (p / (1 - p) + log(1 - p)) / odds², in the odds p / (1 - p)
        series = 1 / 2 - odds * (1 / 3 - odds * (1 / 4 - odds / 5))
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = (odds - np.log1p(odds)) / odds**2
        share = np.where(odds < 1e-3, series, exact)
        # The second value is the derivative of log(odds - log(1 + odds)) by log(odds).
        return 2 * log_odds + np.log(share) - target, 1 / ((1 + odds) * share)

    odds = float(np.exp(solve(excess, np.array(-800.0), np.array(5.0))))
    return odds / (1 + odds)


KAN_INDEPENDENT_METHOD = "Theorem 5.4 of the KAN paper"


def kan_independent_epsilon(
    noise: float, delta: float, *, steps: int, sampling_rate: float
) -> float:
    """Computes the ε that Theorem 5.4 of the KAN paper states for independent noise.

    The paper is Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with
    Correlated Noise (2026). Neighbours replace one example. A step's divergence is 8 q² α / σ² at
    order α = 1 + 2 ln(1/δ) / ε; it takes half of ε, and ln(1/δ) / (α - 1) the other half. The claim
    is false for short runs: state it only with a proven bound beside it. No argument is checked.

    Args:
        noise: σ > 0, a step's standard deviation over the clipping norm.
        delta: in (0, 1).
        steps: T.
        sampling_rate: q, a batch's share of the examples.

    >>> round(kan_independent_epsilon(8.0, 1e-5, steps=1000, sampling_rate=0.01), 4)
    0.7713
    """
    # σ² ε² = 16 q² T (ε + 2 ln(1/δ)), solved for ε.
    spent = 16 * steps * sampling_rate**2 / noise**2
    return (spent + math.sqrt(spent**2 - 8 * spent * math.log(delta))) / 2


KAN_METHOD = "Theorem F.12 of the KAN paper (its Gaussian step exact where the paper's falls short)"
_LEAST, _MOST = 1e-150, 1e150
_SHARE = 0.5
"""α: the share of δ that goes to the tail of the participations."""


def kan_noise(
    epsilon: float, delta: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """Computes the deviation of z_t, in clipping norms, for (ε, δ) by Theorem F.12 (KAN paper).

    That is sqrt((1 + η) T q) sqrt(2 ln(1.25 / ((1 - α) δ))) / ((1 - λ) ε), with α = 1/2 and η =
    sqrt(3 ln(1 / (α δ)) / (T q)), or what the exact Gaussian mechanism takes if that is more.
    Neighbours exchange an example's contribution for zero. Paper: `kan_independent_epsilon`.

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        steps: T, of which step t releases with the noise z_t - λ z_(t-1).
        sampling_rate: q, the probability of an example to be in a step's batch.
        correlation: λ in [0, 1).

    Raises:
        FedsimError: an argument is out of its range, or η > 1: then the theorem does not apply.
    """
    if not epsilon > 0:
        raise FedsimError("variant paper: Theorem F.12 needs ε > 0: use variant: exact")
    reach = _reach(delta, steps=steps, sampling_rate=sampling_rate, correlation=correlation)
    # The classical mechanism is proven for ε <= 1 only; beyond, the exact one may need more noise.
    exact = float(gaussian.noise_multiplier(epsilon, (1 - _SHARE) * delta))
    return reach * max(_classical(delta) / epsilon, exact)


def kan_epsilon(
    noise: float, delta: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """Computes the least ε for which `kan_noise` is at most `noise`; it fails as that does.

    Args:
        noise: above 0, standard deviation of z_t over the clipping norm; z_t, η, T: `kan_noise`.
        delta: in (0, 1).
        steps: T.
        sampling_rate: q, the probability of an example to be in a step's batch.
        correlation: λ in [0, 1).
    """
    require_range("noise", noise, math.nextafter(0, 1), math.inf, "a number above 0")
    reach = _reach(delta, steps=steps, sampling_rate=sampling_rate, correlation=correlation)
    exact = float(gaussian.epsilon(noise / reach, (1 - _SHARE) * delta))
    return max(_classical(delta) * reach / noise, exact)


def _classical(delta: float) -> float:
    return math.sqrt(2 * math.log(1.25 / ((1 - _SHARE) * delta)))


def _reach(delta: float, *, steps: int, sampling_rate: float, correlation: float) -> float:
    """Bounds how far an example moves C G, in clipping norms; exceeded with probability α δ."""
    require_delta(delta)
    require_range("steps", steps, 1, _MOST, "a number of at least 1")
    require_range("sampling_rate", sampling_rate, _LEAST, 1, "a probability above 0")
    require_range("correlation", correlation, 0, math.nextafter(1, 0), "a number in [0, 1)")
    participations = steps * sampling_rate
    # Chernoff: more than (1 + η) T q participations have probability at most exp(-η² T q / 3),
    # which is set to α δ. It holds for η <= 1.
    slack = math.sqrt(3 * math.log(1 / (_SHARE * delta)) / participations)
    if slack > 1:
        raise FedsimError(
            f"variant paper: Theorem F.12 needs steps x sampling_rate >= 3 log(2 / δ) = "
            f"{slack**2 * participations:.4g} and has {participations:.4g}: use variant: exact"
        )
    # No singular value of C reaches 1 / (1 - λ): so many participations move C G by less.
    return math.sqrt((1 + slack) * participations) / (1 - correlation)


def kan_least_delta(steps: int, sampling_rate: float) -> float:
    """Returns 2 exp(-steps * sampling_rate / 3): `kan_noise` takes no less as δ; above 1, none."""
    return math.exp(-steps * sampling_rate / 3) / _SHARE
