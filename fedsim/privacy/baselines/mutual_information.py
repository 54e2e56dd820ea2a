"""Random projections calibrated by mutual information, for comparison.

Showkatbakhsh, Karakus and Diggavi, Privacy-Utility Trade-off of Linear Regression under Random
Projections and Additive Noise, ISIT 2018 ([17] of the NDIS paper), release the noisy projection
D'G + σ N and ask that a row has at most so much mutual information with it, given all other rows,
whatever its distribution. That implies privacy of total variation sqrt(2 I), and so (ε, δ) for
every ε >= 0 with δ = sqrt(2 I) (Cuff and Yu, Differential Privacy as a Mutual Information
Constraint, CCS 2016). The bound on I here is our own: a mutual information is at most the largest
Kullback-Leibler divergence from the release without the row, which for a row of leverage p and r
columns is r (p / (1 - p) + log(1 - p)) / 2.
"""

from __future__ import annotations

import math

import numpy as np

from fedsim.privacy.numerics.special import Array, checked, checked_delta, solve


def max_leverage(delta: float, r: float) -> float:
    """The largest leverage at which the mutual information is at most δ² / 2, for any ε.

    Raises:
        FedsimError: an argument is out of range.

    >>> f"{max_leverage(1e-3, 300):.3e}"
    '8.165e-05'
    """
    columns = float(checked("r", r, 1.0, 1e300, "a number of columns, at least 1"))
    target = 2 * math.log(float(checked_delta(delta))) - math.log(columns)

    def excess(log_odds: Array) -> tuple[Array, Array]:
        odds = np.exp(log_odds)
        # (p / (1 - p) + log(1 - p)) / odds², in the odds p / (1 - p)
        series = 1 / 2 - odds * (1 / 3 - odds * (1 / 4 - odds / 5))
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = (odds - np.log1p(odds)) / odds**2
        share = np.where(odds < 1e-3, series, exact)
        return 2 * log_odds + np.log(share) - target, 1 / ((1 + odds) * share)

    odds = float(np.exp(solve(excess, np.array(-800.0), np.array(5.0))))
    return odds / (1 + odds)
