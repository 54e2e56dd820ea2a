"""Bounds from theory on the recovery of features: the paper's rates, and limits of any attack.

Rates: Liu et al., Data Reconstruction Attacks and Defenses, section 3 and Appendix C, for
`tensor_features`, up to a constant; they say how its error grows, not how large it is, and nothing
of other attacks. Limits: of any attack, from the information in a noisy release.
"""

from __future__ import annotations

import math


def tensor_rate(
    *,
    width: int,
    dimension: int,
    images: int,
    classes: int,
    noise: float = 0.0,
    clipped: float = 1.0,
    kept: float = 1.0,
) -> float:
    """Computes K (B + σ c) sqrt(d / (p m)), to which the tensor attack's error is proportional.

    Args:
        width: m, planted neurons.
        dimension: d of the features.
        images: B; of several local steps on different batches, the images of all of them.
        classes: K.
        noise: σ, standard deviation of the noise in units of one image's part of an entry of ∂L/∂A.
        clipped: max(1, |g| / S) of clipping to S. It scales the noise and, alone, changes nothing.
        kept: p, the share of neurons that dropout keeps.

    Raises:
        ValueError: `kept` is not in (0, 1], `clipped` below 1, or another argument not positive.

    >>> tensor_rate(width=4096, dimension=64, images=1, classes=2)
    0.25
    >>> tensor_rate(width=4096, dimension=64, images=1, classes=2, noise=1, clipped=3)
    1.0
    """
    if not (0 < kept <= 1 and clipped >= 1 and noise >= 0):
        raise ValueError("expected kept in (0, 1], clipped >= 1 and noise >= 0")
    if min(width, dimension, images, classes) < 1:
        raise ValueError("expected width, dimension, images and classes of at least 1")
    return classes * (images + noise * clipped) * math.sqrt(dimension / (kept * width))


def gaussian_information(energy: float, std: float) -> float:
    """Bounds the nats that a release with Gaussian noise tells of a part of energy |g|² in it.

    Half the energy over the variance: n ln(1 + P / n) <= P in any number n of entries. An example
    of DP-SGD with noise multiplier z has energy C² behind a standard deviation of z C on the sum:
    1 / (2 z²), whatever the others are.

    Raises:
        ValueError: `std` is not positive or `energy` is negative.

    >>> gaussian_information(energy=1.0, std=2.0)
    0.125
    """
    if std <= 0 or energy < 0:
        raise ValueError("expected std > 0 and energy >= 0")
    return energy / (2 * std**2)


def chance_within(error: float, information: float, dimension: int) -> float:
    """Bounds the probability with which any attack finds a direction to within `error`.

    `error` is the sine of the angle to the true line, the subspace metric of one feature, in
    (0, 1); the direction is uniform in `dimension` >= 2, and `information` in nats is what was
    released of it. Fano's inequality for continuous parameters (Duchi and Wainwright,
    Distance-based and Continuum Fano Inequalities, arXiv 1311.2669, Proposition 2):
    (I + ln 2) / ln(1 / V), where V is the share of the sphere within `error` of a line. An attacker
    who knows more beforehand, as that features are alike, starts from there.

    Raises:
        ValueError: an argument is out of range.

    >>> round(chance_within(0.5, information=5.6, dimension=512), 3)
    0.018
    """
    from scipy.special import betainc

    if not (0 < error < 1 and information >= 0 and dimension >= 2):
        raise ValueError("expected error in (0, 1), information >= 0 and dimension >= 2")
    # The squared sine of a uniform direction's angle to a
    # line has the law Beta((d - 1) / 2, 1 / 2).
    share = float(betainc((dimension - 1) / 2, 0.5, error**2))
    # The share underflows in high dimensions, where the bound tends to 0.
    if share == 0:
        return 0.0
    return min(1.0, (information + math.log(2)) / -math.log(share))
