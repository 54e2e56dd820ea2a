"""The noise of earlier random projections, for comparison.

Source: Sheffet, Old Techniques in Differentially Private Linear Regression, ALT 2019, as stated by
Lu et al., The Normal Distributions Indistinguishability Spectrum, Figure 14.
"""

from __future__ import annotations

import math

from fedsim.privacy.numerics.special import checked, checked_delta, checked_epsilon


def sigma(row_norm: float, r: float, epsilon: float, delta: float) -> float:
    """sqrt(4 l² (sqrt(2 r log(4/δ)) + log(4/δ)) / ε): σ of the rows σ I appended to the data.

    `row_norm` = l has to hold for every row that any database may have. Sheffet takes it from the
    data, which releases it: the noise of two neighbours then differs.

    Raises:
        FedsimError: an argument is out of range, or ε = 0.

    >>> round(sigma(1.1075, 300, 1.0, 1 / 2809), 3)
    20.317
    """
    norm = float(checked("row_norm", row_norm, 0.0, 1e300, "a norm of at least 0"))
    columns = float(checked("r", r, 1.0, 1e300, "a number of columns, at least 1"))
    eps = float(checked("epsilon", checked_epsilon(epsilon), 1e-300, 1e300, "a number above 0"))
    log = math.log(4 / float(checked_delta(delta)))
    return 2 * norm * math.sqrt((math.sqrt(2 * columns * log) + log) / eps)
