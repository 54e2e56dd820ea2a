"""Bounds from theory on what can be recovered: the paper's for its attack, and those of any attack.

Upper bounds on the error: Liu et al., Data Reconstruction Attacks and Defenses, section 3 and
Appendices B and C, of `tensor_features` alone and up to a constant that the paper does not give.
Limits of any attack say how likely it is right, given how likely a guess without the release is. A
function that states no error checks no argument.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from fedsim.contracts.listing import key_table
from fedsim.contracts.plugins import parameters
from fedsim.privacy.contract import Count, Keys, PositiveSize
from fedsim.privacy.membership import tpr_limit
from fedsim.types import FedsimError

EpsilonDelta = tuple[float, float]
"""An (ε, δ) that a release has."""


_TINY = 1e-150
"""Least number whose square is above 0 for certain."""


def _within(least: float, most: float = math.inf, **values: float) -> None:
    for name, value in values.items():
        if not least <= value <= most:
            raise FedsimError(f"{name}: got {value:g}; expected {least:g} to {most:g}")


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
    """Computes K (B + σ c) sqrt(d / (p m)), proportional to the error of `tensor_features`.

    Source: Liu et al., Data Reconstruction Attacks and Defenses, section 3. An argument out
    of its range is a FedsimError.

    Args:
        width: m, number of planted neurons.
        dimension: d of the features.
        images: B; of several local steps on different batches, the images of all of them.
        classes: K.
        noise: σ, deviation of the noise in units of one image's part of an entry of ∂L/∂A, the
            gradient of the last layer's weights.
        clipped: c = max(1, |g| / S) of clipping to S, which scales the noise.
        kept: p in (0, 1], the share of neurons that dropout keeps.

    >>> tensor_rate(width=4096, dimension=64, images=1, classes=2)
    0.25
    >>> tensor_rate(width=4096, dimension=64, images=1, classes=2, noise=1, clipped=3)
    1.0
    """
    _within(1, width=width, dimension=dimension, images=images, classes=classes, clipped=clipped)
    _within(0, noise=noise)
    _within(_TINY, 1, kept=kept)
    return classes * (images + noise * clipped) * math.sqrt(dimension / (kept * width))


def gaussian_information(energy: float, std: float) -> float:
    """Bounds the nats that a release with Gaussian noise tells of a part of it.

    `energy` is |g|², the largest squared norm of the part, and `std` is the noise's standard
    deviation on an entry. An example of DP-SGD with noise multiplier z and clipping norm C has
    energy C² behind the deviation z C on the sum: 1 / (2 z²).

    >>> gaussian_information(energy=1.0, std=2.0)
    0.125
    """
    _within(0, energy=energy)
    _within(_TINY, std=std)
    # n ln(1 + P / n) <= P in any number n of entries.
    return energy / (2 * std**2)


def chance_within(error: float, information: float, dimension: int) -> float:
    """Bounds the probability with which any attack finds a direction to a sine of at most `error`.

    Fano's inequality for continuous parameters gives (I + ln 2) / ln(1 / V), where V is the share
    of the sphere so close to a line (Duchi and Wainwright, Distance-based and Continuum Fano
    Inequalities, arXiv 1311.2669, Proposition 2). I is the `information` in nats that was released
    of the direction, which is uniform on the sphere in `dimension` >= 2 dimensions. `error` is in
    [0, 1). An attacker with prior knowledge, such as that features are alike, is not bound by it.

    >>> round(chance_within(0.5, information=5.6, dimension=512), 3)
    0.018
    """
    from scipy.special import betainc

    _within(0, 1, error=error)
    _within(0, information=information)
    _within(2, dimension=dimension)
    # The squared sine of a uniform direction's angle to a
    # line has the law Beta((d - 1) / 2, 1 / 2).
    share = float(betainc((dimension - 1) / 2, 0.5, error**2))
    # The share underflows in high dimensions, where the bound tends to 0.
    if share == 0:
        return 0.0
    if share == 1:
        return 1.0
    return min(1.0, (information + math.log(2)) / -math.log(share))


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softplus": lambda x: math.log1p(math.exp(-abs(x))) + max(x, 0.0),
    "tanh": math.tanh,
}

_FARTHEST = math.sqrt(2)
"""Distance of two unit vectors up to sign, which no error of a unit vector need exceed."""


@cache
def _activation_moment(activation: str) -> float:
    """Computes min(|ν|, |λ|) of Assumption A.1: what an activation leaves of features."""
    # ν is E σ^(k)(z) of standard normal z at the first k >= 2 where it is not 0, and λ at the first
    # k >= 3.
    from scipy.integrate import quad

    function = _ACTIVATIONS[activation]
    # By Stein's lemma the moments are E σ(z) He_k(z), so that no derivative is needed.
    hermite: dict[int, Callable[[float], float]] = {
        2: lambda z: z**2 - 1,
        3: lambda z: z**3 - 3 * z,
        4: lambda z: z**4 - 6 * z**2 + 3,
    }
    moments: dict[int, float] = {}
    for order, polynomial in hermite.items():
        # A kink at 0 is where the two integrals meet.
        parts = (
            quad(lambda z: function(z) * polynomial(z) * math.exp(-(z**2) / 2), *ends)[0]  # noqa: B023
            for ends in ((-12, 0), (0, 12))
        )
        moments[order] = abs(sum(parts)) / math.sqrt(2 * math.pi)
    least = 1e-9
    nu = next(moments[k] for k in (2, 3, 4) if moments[k] > least)
    return min(nu, next(moments[k] for k in (3, 4) if moments[k] > least))


@dataclass(frozen=True, kw_only=True)
class TensorBound:
    """States Liu et al.'s upper bound on the error of attack `tensor_features`, if it applies."""

    rate: float | None = None
    """`tensor_rate`, to which the bound is proportional; None if theory says nothing."""
    value: float | None = None
    """rate / (min(|ν|, |λ|) π_min²), ν and λ being moments of the activation: root mean square
    distance of unit features, the hidden constant and logarithms taken for 1; None as `rate`."""
    reason: str | None = None
    """The first condition that fails; None if the theorem applies and says something."""

    @property
    def is_valid(self) -> bool:
        """Whether theory says something, and all conditions that can be checked hold."""
        return self.value is not None and self.reason is None


def tensor_bound(
    rate: float,
    *,
    width: int,
    dimension: int,
    images: int,
    classes: int,
    activation: str = "relu",
    independence: float = 1.0,
    steps: int = 1,
) -> TensorBound:
    """Returns Theorem B.1's bound (Liu et al.) at `rate`, and the first condition that fails.

    With every hidden constant and logarithm taken for 1 the conditions are the easiest to meet: a
    bound that fails here fails whatever they are. An unknown `activation` is a KeyError, and a
    number out of its range a FedsimError.

    Args:
        rate: `tensor_rate` of the same setting, noise and dropout included.
        width: number of neurons that dropout left.
        dimension: d of the features.
        images: B, images of a batch.
        classes: K.
        activation: a name that `fedsim privacy recovery` lists.
        independence: π_min in (0, 1], the least singular value of the unit features.
        steps: local steps, of which the paper proves one and two.
    """
    _within(0, rate=rate)
    _within(1, width=width, dimension=dimension, images=images, classes=classes, steps=steps)
    _within(_TINY, 1, independence=independence)
    # Checked before the rate is looked at: without a unique decomposition it has no meaning.
    if images > dimension:
        return TensorBound(
            reason=f"{images} images are more than the {dimension} dimensions of their features, "
            "whose tensor has no unique decomposition (section 3.4)"
        )
    moment = _activation_moment(activation)
    value = rate / (moment * independence**2)
    neurons = (classes * images) ** 2 * dimension / (moment * independence) ** 2
    failed = {
        f"proven for one and two steps, not for {steps} (Propositions C.1 and C.2)": steps > 2,
        f"K² B⁴ = {classes**2 * images**4:g} is above d = {dimension} (Theorem B.1)": classes**2
        * images**4
        > dimension,
        f"{width} neurons are fewer than K² B² d / (ν² π_min²) = {neurons:.3g} (Theorem B.1)": width
        < neurons,
        f"{value:.3g} is above the {_FARTHEST:.3g} that no unit vector exceeds": value > _FARTHEST,
    }
    # One broken condition is enough, and the first is the one that is told.
    reason = next((why for why, is_so in failed.items() if is_so), None)
    return TensorBound(rate=rate, value=value, reason=reason)


def success_limit(chance: float, claims: Iterable[EpsilonDelta]) -> float:
    """Bounds the probability with which any attack comes close to the truth, given (ε, δ) claims.

    Any answer that is independent of the release is close with probability `chance` at most, over
    the prior of the one unit that the claims protect. Whatever else the attacker knows of the data,
    it succeeds with at most e^ε chance + δ, and 1 - e^-ε (1 - δ - chance): the least of these is
    returned, 1 without claims (Balle, Cherubin and Hayes, Reconstructing Training Data with
    Informed Adversaries, S&P 2022, Theorem 2; Hayes, Mahloujifar and Balle, Bounding Training Data
    Reconstruction in DP-SGD, NeurIPS 2023, Theorem 2). The bound is concave in `chance`.

    Amplification by sampling must not be in `claims`: whoever is attacked was drawn. Errors are
    those of `tpr_limit`.

    >>> round(success_limit(0.001, [(1.0, 0.0)]), 6)
    0.002718
    >>> success_limit(0.001, [])
    1.0
    """
    return min((tpr_limit(epsilon, delta, chance) for epsilon, delta in claims), default=1.0)


def gaussian_success_limit(chance: float, distance: float) -> float:
    """Bounds the probability of `success_limit` behind Gaussian noise alone: Φ(Φ⁻¹(chance) + μ).

    `chance` >= 0 is as there; above 1 it counts as 1. `distance` is μ >= 0: a unit moves the
    released mean so far, in its noise's deviations. T steps with noise multiplier z move it by
    sqrt(T) / z. No curve of claims gives a smaller bound (Dong, Roth and Su, Gaussian Differential
    Privacy, 2022, section 2).

    >>> gaussian_success_limit(0.5, 0.0)
    0.5
    """
    from scipy.special import ndtr, ndtri

    return float(ndtr(ndtri(min(1.0, chance)) + distance))


def mean_limit(
    levels: Sequence[float], chances: Sequence[float], success: Callable[[float], float]
) -> float:
    """Bounds from above the mean score of any attack, given how likely a guess reaches each level.

    `levels` are values of the score from least to most, ends of its range included. `chances` are
    the probabilities, as many, that a guess without the release reaches each. `success` maps such a
    chance to a bound on an attack's, as `success_limit` does.
    """
    # The mean of a score X is at most levels[0] + ∫ P(X >= t) dt from there on. The chances fall,
    # so that the value at the left of each interval bounds the integral.
    steps = zip(levels, levels[1:], chances, strict=False)
    return levels[0] + math.fsum((high - low) * success(chance) for low, high, chance in steps)


def direction_chances(sines: Sequence[float], dimension: int, answers: int = 1) -> list[float]:
    """Computes for each of `sines` the probability that guesses are as close to a direction.

    The sine is of the angle between the direction, uniform in `dimension` d, and the span of
    `answers` guesses. From d guesses on the probability is 1.
    """
    from scipy.special import betainc

    if answers >= dimension:
        return [1.0] * len(sines)
    # The squared sine to a space of k dimensions has the law Beta((d - k) / 2, k / 2).
    squares = np.square(np.clip(sines, 0, 1))
    return [float(each) for each in betainc((dimension - answers) / 2, answers / 2, squares)]


def least_direction_error(
    dimension: int, success: Callable[[float], float], answers: int = 1
) -> float:
    """Bounds from below the mean sine between a uniform direction and the span of any answers.

    The distance of a unit vector to any answer is at least that sine. `success` maps a guess's
    probability to a bound on an attack's, and `answers` is the number of the attack's answers, the
    images of a batch.

    >>> round(least_direction_error(512, lambda chance: gaussian_success_limit(chance, 1.0)), 3)
    0.997
    """
    sines = [k / 1000 for k in range(1001)]
    shortfall = [1 - success(chance) for chance in direction_chances(sines, dimension, answers)]
    # 1 - P falls with the sine: its value at the right of each interval bounds the integral.
    return math.fsum(shortfall[1:]) / 1000


def van_trees(fisher: NDArray[np.float64], prior: NDArray[np.float64]) -> float:
    """Bounds from below the mean squared error, summed over entries, of any estimator.

    The bound is tr((E J + I)⁻¹) (van Trees, Detection, Estimation and Modulation Theory I, 1968,
    section 2.4.3; Gill and Levit, Bernoulli 1, 1995). `fisher` is E J, the (d, d) mean over the
    prior of the release's Fisher information J. `prior` is I, the (d, d) Fisher information of the
    prior, for a normal one its inverse covariance. The prior's density has to vanish at its ends,
    and the release's to be differentiable, as gradients of ReLU networks are not. Behind Gaussian
    noise of deviation s, J is D'D / s² for the derivative D of what is released. A singular E J + I
    is a LinAlgError.

    >>> van_trees(np.eye(2) / 0.5, np.eye(2))  # twice 1 / (1 / 0.5 + 1)
    0.6666666666666666
    """
    return float(np.trace(np.linalg.inv(fisher + prior)))


def least_normal_error(variances: Sequence[float], information: float) -> float:
    """Bounds from below the total squared error of any attack on a normal vector.

    The bound is the distortion-rate function of independent normal entries, by reverse
    water-filling (Cover and Thomas, Elements of Information Theory, Theorem 10.3.3). `variances`
    are those along the principal axes, and `information` the largest mutual information of release
    and vector, in nats. No derivative is needed, so that it holds for ReLU networks as well.

    >>> least_normal_error([1.0, 1.0], 0.0), round(least_normal_error([1.0, 1.0], 1.0), 4)
    (2.0, 0.7358)
    """
    ordered = np.sort([each for each in variances if each > 0])[::-1]
    if not len(ordered):
        return 0.0
    # Spending all on the k largest entries leaves them at a level; the best k leaves the highest.
    spent = np.log(ordered).cumsum() - 2 * max(0.0, information)
    level = np.exp((spent / np.arange(1, len(ordered) + 1)).max())
    return float(np.minimum(ordered, level).sum())


_PositiveShare = Annotated[float, Field(gt=0, le=1)]


class _RecoverySetting(Keys):
    """The two-layer head, its batch and the defenses of which bounds are asked."""

    width: Count
    """m, planted neurons."""
    dimension: Annotated[int, Field(ge=2, le=1_000_000_000)]
    """d of the features."""
    images: Count = 1
    """B, images of a batch."""
    classes: Count = 10
    """K."""
    activation: Literal["relu", "leaky_relu", "elu", "gelu", "sigmoid", "softplus", "tanh"] = "relu"
    """σ of the head."""
    independence: _PositiveShare = 1.0
    """π_min, the least singular value of the unit features: 1 if they are orthogonal."""
    steps: Count = 2
    """Local steps."""
    noise: Annotated[float, Field(ge=0, le=1e12)] = 1.0
    """σ, standard deviation of the noise over the size of one image's part of an entry of ∂L/∂A.
    It is neither an absolute deviation nor a noise multiplier."""
    clipped: Annotated[float, Field(ge=1, le=1e12)] = 1.0
    """max(1, |g| / S): by how much clipping shortens a gradient."""
    noise_multiplier: PositiveSize | None = None
    """z of DP-SGD: noise over the bound of one image's gradient. Without it DP-SGD has no limit."""
    clients: Count = 10
    """Clients in a sum."""
    kept: _PositiveShare = 0.5
    """Share of neurons that dropout keeps."""
    candidates: Count = 1000
    """Images among which an attacker may look for the true one, each as likely."""


@dataclass(frozen=True, kw_only=True)
class DefenseBounds:
    """States what theory says of one defense; None where it says nothing, with the reason."""

    defense: str
    rate: float | None = None
    """`tensor_rate`, to which the error of attack `tensor_features` is proportional."""
    upper: float | None = None
    """Upper bound of that error, a root mean square distance of unit features, with the hidden
    constant and logarithms at 1. It is stated even if `valid` is False."""
    valid: bool = False
    """Whether the conditions of the theorem hold, as far as they can be checked."""
    reason: str | None = None
    """Why the theorem does not apply, or says nothing; None if it applies."""
    lower: float | None = None
    """Least mean sine of the angle between a feature of uniform direction and the span of any
    attack's answers, one for each image."""
    identified: float | None = None
    """Chance of any attack, at most, to have a given image of the batch among its answers: as many
    candidates as the batch has images. To have any of them is likelier."""
    lower_reason: str | None = None
    """Why `lower` and `identified` are None; None if they are not."""


def list_keys(as_json: bool = False) -> str:
    """Returns the keys of `recovery`, with type, default, range and meaning, as text or as JSON."""
    keys = [asdict(parameter) for parameter in parameters(_RecoverySetting)]
    return json.dumps(keys, indent=2) if as_json else "\n".join(key_table(keys, 80))


def recovery(keys: Mapping[str, Any]) -> list[DefenseBounds]:
    """Returns the bounds behind each of nine defenses of Liu et al., section 3.

    They are none, local steps on one batch or on others, clipping, noise, DP-SGD, aggregation,
    dropout and pruning, in this order. `keys` has values by name, which `list_keys` describes. A
    key that is missing, unknown or out of range is a FedsimError.
    """
    from fedsim.scenario.explain import explain, known_keys

    try:
        asked = _RecoverySetting.model_validate(dict(keys))
    except ValidationError as error:
        told = explain(error, dict(keys), known_keys(_RecoverySetting))
        lines = [
            f"{'.'.join(map(str, path))}: {message}".removeprefix(": ") for path, message in told
        ]
        raise FedsimError("\n".join(f"recovery: {line}" for line in lines)) from error
    plain = asked.model_copy(update={"noise": 0.0, "clipped": 1.0})
    several = asked.steps > 1
    # Whatever is not random is a function of the data: an attacker may know it by heart.
    silent = "nothing random is released"
    return [
        _bounds("none", plain, silent),
        _bounds("local steps, one batch", plain, silent, steps=asked.steps),
        _bounds(
            "local steps, other batches",
            plain,
            silent,
            images=asked.images * asked.steps,
            steps=asked.steps if several else 1,
        ),
        _bounds("clipping", plain, silent),
        _bounds("noise", asked.model_copy(update={"clipped": 1.0}), _UNCLIPPED),
        _dp_sgd(asked),
        _bounds("aggregation", plain, silent, images=asked.images * asked.clients),
        _bounds("dropout", plain, "it hides neurons and adds no noise", kept=asked.kept),
        DefenseBounds(defense="pruning", reason=_PRUNED, lower_reason=silent),
    ]


_PRUNED = (
    "entries that are kept depend on the weights, so that Stein's lemma does not apply "
    "(section 3.6)"
)
_UNCLIPPED = "noise without a bound of one image's part: a large enough gradient shows through it"


def _bounds(
    defense: str,
    asked: _RecoverySetting,
    silent: str,
    *,
    images: int | None = None,
    steps: int = 1,
    kept: float = 1.0,
) -> DefenseBounds:
    count = images or asked.images
    shape = {"dimension": asked.dimension, "images": count, "classes": asked.classes}
    rate = tensor_rate(
        width=asked.width, **shape, noise=asked.noise, clipped=asked.clipped, kept=kept
    )
    found = tensor_bound(
        rate,
        # Neurons that a defense removed give no equation: the rest is a narrower head.
        width=max(1, math.floor(kept * asked.width)),
        **shape,
        activation=asked.activation,
        independence=asked.independence,
        steps=steps,
    )
    return DefenseBounds(
        defense=defense,
        rate=found.rate,
        upper=found.value,
        valid=found.is_valid,
        reason=found.reason,
        lower_reason=silent,
    )


def _dp_sgd(asked: _RecoverySetting) -> DefenseBounds:
    found = _bounds("clipping and noise (DP-SGD)", asked, "noise_multiplier is not given")
    if asked.noise_multiplier is None:
        return found
    # An image moves the released sum by its bound at most, in each step that it is in.
    distance = math.sqrt(asked.steps) / asked.noise_multiplier

    def success(chance: float) -> float:
        return gaussian_success_limit(chance, distance)

    return replace(
        found,
        lower=least_direction_error(asked.dimension, success, asked.images),
        identified=success(min(1.0, asked.images / asked.candidates)),
        lower_reason=None,
    )


def describe(bounds: DefenseBounds) -> str:
    """Returns the bounds of a defense in words: several lines, without a newline at the end."""
    above = "no bound" if bounds.upper is None else f"at most {bounds.upper:.4g} x constant"
    lines = [bounds.defense, f"    tensor attack  {above}"]
    if bounds.reason:
        lines.append(f"    not valid      {bounds.reason}")
    if bounds.lower is None or bounds.identified is None:
        lines.append(f"    any attack     no bound: {bounds.lower_reason}")
    else:
        lines.append(
            f"    any attack     mean span error at least {bounds.lower:.4g}; "
            f"a given image is among its answers with at most {bounds.identified:.4g}"
        )
    return "\n".join(lines)
