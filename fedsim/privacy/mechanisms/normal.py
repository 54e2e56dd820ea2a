"""The calculator's mechanism `normal`: any two normal distributions, read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsim.privacy.contract import WAYS, Answer, Direction, ExactCurve, KnownMechanism
from fedsim.privacy.numerics.ndis import NormalPair, estimate, pair
from fedsim.privacy.numerics.special import Array
from fedsim.system import paths
from fedsim.types import FedsimError
from fedsim.words import number_of


class NormalCurve(ExactCurve):
    """Curve δ(ε) of the pair of distributions in a file."""

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
        """Describes the neighbours: the file's two distributions."""
        return "the two distributions"

    def delta(self, epsilon: float) -> Answer:
        """Computes δ at ε >= 0, exactly or by Monte Carlo with an interval."""
        if self.method == "monte_carlo":
            return self._estimate(epsilon)
        return super().delta(epsilon)

    def epsilon(self, delta: float) -> Answer:
        """Computes the least ε >= 0 for δ in (0, 1); a FedsimError by `monte_carlo`."""
        if self.method == "monte_carlo":
            raise FedsimError("method: monte_carlo estimates δ only; use method=exact for ε")
        return super().epsilon(delta)

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        """Computes log δ of the first distribution against the second (`forward`), and `reverse`.

        Raises:
            FedsimError: the file cannot be read, or holds no such distributions.
        """
        return {way: pair.log_delta(epsilons) for way, pair in self._pairs().items()}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        """Computes the least ε >= 0 for δ in (0, 1), by direction as in `log_deltas`."""
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
        found = {way: estimate(each, epsilon, rng=rng, **keys) for way, each in pairs.items()}
        way = max(found, key=lambda each: found[each].delta)
        best = found[way]
        with np.errstate(divide="ignore"):
            log_delta = float(np.log(best.delta))
        return Answer(
            epsilon=epsilon,
            delta=best.delta,
            log_delta=log_delta,
            method="Monte-Carlo with Hoeffding's bound, "
            f"{number_of(best.draws, 'draw')} (Lu et al., Figure 2)",
            direction=way,
            interval=best.interval,
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
    """Any two normal distributions, one for each neighbour."""

    curve = NormalCurve
