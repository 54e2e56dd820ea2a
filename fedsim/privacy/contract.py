"""Defines what a mechanism offers the privacy calculator: δ(ε), ε(δ), its noise, an audit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.contracts.plugins import Plugin

Direction = Literal["forward", "reverse", "both"]
"""Direction of δ between neighbours P and Q, the least with P(S) <= exp(ε) Q(S) + δ for every S:
`forward` is P with the row and Q without it, `reverse` the other way round, `both` their larger."""
WAYS: tuple[Direction, ...] = ("forward", "reverse")

PositiveSize = Annotated[float, Field(ge=1e-12, le=1e12)]
"""A noise, a norm or a distance, in the range that can be computed with."""
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds an answer of the calculator; fields that do not apply to the mechanism are None.

    `epsilon` and `delta` belong together: one was given, and the other found. A calibration's are
    those asked for, or one of them with what the noise gives there. A figure that was found may be
    a bound, or an estimate, see `interval`.
    """

    epsilon: float
    delta: float
    log_delta: float
    """Natural logarithm of δ, right where δ itself underflows; -inf for δ = 0."""
    method: str
    """Method in words, such as `closed form` or `Monte-Carlo of the dominating pair`."""
    direction: Direction | None = None
    """The direction with the larger δ, which is the one stated. `forward`: P(S) <= exp(ε) Q(S) + δ
    for P with the row and Q without it. `reverse`: the other way round. `both`: they are alike, or
    δ covers both. None: it is not known which."""
    sigma: float | None = None
    """Standard deviation of the noise, in the units of the release; of `least_squares`, σ of the
    rows σ I appended to the data. `correlated_gaussian` counts it in clipping norms."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise over the sensitivity; of steps of DP-SGD, over the clipping
    norm. `least_squares` and `random_projection`: `sigma` over the bound on a row's norm."""
    max_leverage: float | None = None
    """The largest leverage of a row at which the release is still (ε, δ)-private."""
    scale: float | None = None
    """Scale of Laplace noise, in the units of the release."""
    bound: float | None = None
    """The largest magnitude of bounded noise, in the units of the release."""
    draws: int | None = None
    """The largest number of draws at which a sampling mechanism is (ε, δ)-private."""
    interval: tuple[float, float] | None = None
    """(low, high) of the figure that was asked for, δ or ε, where it is an estimate."""
    confidence: float | None = None
    """Probability that the interval holds the figure."""
    unit: str | None = None
    """The unit that ε and δ protect: a row, an example or a client; `unit unknown` of `normal`.
    Only the functions of `calculator` fill in this field and the next."""
    neighbours: str | None = None
    """The difference between two neighbours, in words; nothing is claimed for any others."""


def _larger(found: Mapping[Direction, float]) -> Direction:
    # A NaN compares false with everything: a plain maximum would keep or drop it by its place.
    return max(found, key=lambda way: (math.isnan(found[way]), found[way]))


class Keys(Plugin):
    """Base of models whose fields a user writes as key=value: pydantic refuses unknown keys."""


class Stated(Keys):
    """Base of releases with an ε and a δ: says whose data these protect, and from what change."""

    unit: ClassVar[str] = "row"
    """The unit that ε and δ protect: a row, an example or a client."""

    @abstractmethod
    def neighbours(self) -> str:
        """Describes in words the difference between two neighbours."""


class Curve(Stated):
    """Base of releases whose δ(ε) is known exactly, by a bound or by an estimate.

    Where a figure cannot be computed, the methods raise a FedsimError.
    """

    @abstractmethod
    def delta(self, epsilon: float) -> Answer:
        """Returns an answer whose `delta` is the least known at ε >= 0, of the larger direction."""

    @abstractmethod
    def epsilon(self, delta: float) -> Answer:
        """Returns an answer whose `epsilon` >= 0 is the least known at δ in (0, 1); inf if none."""

    def log_deltas(self, epsilons: NDArray[np.float64]) -> Mapping[Direction, NDArray[np.float64]]:
        """Computes ln δ at each of the (n,) `epsilons` >= 0: an (n,) array for each direction.

        The only key is `both` where the directions are alike or not known apart, as by default.
        """
        return {"both": np.array([self.delta(float(each)).log_delta for each in epsilons])}


class Sensitivity(Keys):
    """Keys of a release whose values for two neighbours are at most a distance apart."""

    sensitivity: PositiveSize
    """L2 distance between the values of two neighbours, in the units of the release."""

    def neighbours(self) -> str:
        """Describes the neighbours: releases at most `sensitivity` apart."""
        return f"at most {self.sensitivity:g} apart"


class ExactCurve(Curve):
    """Base of curves that are computed in each direction; answers state the larger."""

    formula: ClassVar[str] = ""
    """`method` of the answers: the way δ and ε are computed, with its source."""

    @abstractmethod
    def log_deltas(self, epsilons: NDArray[np.float64]) -> Mapping[Direction, NDArray[np.float64]]:
        """See `Curve.log_deltas`."""

    @abstractmethod
    def epsilons(self, delta: float) -> Mapping[Direction, float]:
        """Computes the least ε >= 0 at δ in (0, 1) for each direction, or for the larger alone.

        It is inf if there is none.
        """

    def details(self) -> Mapping[str, Any]:
        """Returns further fields of the answers by name, such as `sigma`; by default none."""
        return {}

    def delta(self, epsilon: float) -> Answer:
        """See `Curve.delta`."""
        lines = self.log_deltas(np.array([epsilon]))
        found = {way: float(values[0]) for way, values in lines.items()}
        way = _larger(found)
        return self._answer(epsilon, found[way], way)

    def epsilon(self, delta: float) -> Answer:
        """See `Curve.epsilon`."""
        found = self.epsilons(delta)
        way = _larger(found)
        return self._answer(found[way], float(np.log(delta)), way)

    def _answer(self, epsilon: float, log_delta: float, direction: Direction) -> Answer:
        fields = {"method": self.formula, "direction": direction, **self.details()}
        delta = float(np.exp(log_delta))
        return Answer(epsilon=epsilon, delta=delta, log_delta=log_delta, **fields)


class Calibration(Stated):
    """Base of releases whose least noise for an ε and a δ can be found."""

    @abstractmethod
    def calibrate(self, epsilon: float, delta: float) -> Answer:
        """Finds the least noise for ε >= 0 and δ in (0, 1), in fields such as `Answer.sigma`.

        A FedsimError says that no noise is enough, or none can be computed.
        """


class Experiment(Keys):
    """Base of releases that can be drawn under either neighbour, to try what they claim.

    What is drawn is a sufficient statistic of the full release, from the mechanism's own steps.
    `sabotage` multiplies the noise: 0.8 draws what a mechanism with 20% less noise than it claims
    would release. The score is the likelihood ratio's logarithm under the noise that was really
    drawn: no other test is stronger (Neyman and Pearson).
    """

    claims: ClassVar[type[Curve]]
    """The curve that is claimed; its keys are the experiment's, but for `sabotage`."""
    gaussian_dp: ClassVar[bool] = False
    """Whether the claim is one of μ-GDP and the release's trade-off curve a Gaussian one."""
    sabotage: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Factor on the noise's standard deviation that the claim does not know of; 1 is honest."""

    def curve(self) -> Curve:
        """Returns the curve that is claimed: the mechanism as declared, without `sabotage`.

        Keys that contradict each other are a ValidationError.
        """
        return self.claims.model_validate(self.model_dump(exclude={"sabotage"}))

    def claim(self, delta: float) -> float:
        """Returns the ε claimed at δ in (0, 1); for an estimate, the upper end of its interval.

        Errors are those of `Curve.epsilon`.
        """
        found = self.curve().epsilon(delta)
        # An estimate is below the truth about half of the time;
        # only the interval's end may be claimed.
        return found.interval[1] if found.interval else found.epsilon

    def work(self) -> int:
        """Estimates how many numbers are computed to draw and score one release, by default 1."""
        return 1

    @abstractmethod
    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draws `draws` releases from `rng`; returns (draws,) scores, rising with the likelihood.

        `present` says whether the neighbour with the row is released: the higher a score, the
        likelier it is that one. A score is infinite where only one of the two can be the source.
        """


class KnownMechanism(Plugin):
    """Names the classes of one mechanism; None for one that it lacks.

    An entry point of the group `fedsim.mechanisms` registers it. The calculator lists the first
    line of a subclass's docstring.
    """

    curve: ClassVar[type[Curve] | None] = None
    calibration: ClassVar[type[Calibration] | None] = None
    experiment: ClassVar[type[Experiment] | None] = None

    @classmethod
    def parts(cls) -> dict[str, type[Keys]]:
        """Returns the classes that are not None, by name: `curve`, `calibration`, `experiment`."""
        named = {"curve": cls.curve, "calibration": cls.calibration, "experiment": cls.experiment}
        return {name: part for name, part in named.items() if part}
